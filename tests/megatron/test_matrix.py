"""What users have switched on, in every combination, with each technique: three iterations, losslessly.

A subset in which every pair of settings occurs runs always, all of it with `--full`.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from tests.megatron.optimus_runs import PP2_DP2, TP2_PP2_DP2, relative_gap, run_optimus
from tests.megatron.test_lossless_limits import FE, LOSSLESS_CB, LOSSLESS_SC
from tests.megatron_runs import last_stage_losses, run_megatron


class Combination(NamedTuple):
    """One setting of each kind; what Megatron is given by `flags`, what we are given by `techniques`."""

    optimizer: str
    reduction: str
    schedule: str
    sequence: str
    precision: str
    technique: str

    @property
    def layout(self) -> tuple[int, tuple[str, ...]]:
        return TP2_PP2_DP2 if self.sequence == "parallel" else PP2_DP2

    @property
    def flags(self) -> list[str]:
        """Of vanilla Megatron."""
        flags = ["--train-iters", "3"]
        if self.optimizer == "sharded":
            flags.append("--use-distributed-optimizer")
        if self.reduction == "overlapped":
            flags.append("--overlap-grad-reduce")
        if self.reduction == "overlapped" and self.optimizer == "sharded":
            flags.append("--overlap-param-gather")
        if self.schedule == "interleaved":
            flags += ["--num-layers-per-virtual-pipeline-stage", "1"]
        if self.sequence == "parallel":
            flags.append("--sequence-parallel")
        if self.precision == "fp16":
            flags += ["--fp16", "--initial-loss-scale", "65536"]
        if self.precision == "bf16":
            flags.append("--bf16")
        return flags

    @property
    def techniques(self) -> list[str]:
        every = {"CB": LOSSLESS_CB, "FE": [*FE], "SC": LOSSLESS_SC}
        chosen = every.values() if self.technique == "all" else [every[self.technique]]
        return list(itertools.chain(*chosen))


SETTINGS = {
    "optimizer": ("replicated", "sharded"),
    "reduction": ("at the end", "overlapped"),
    "schedule": ("1F1B", "interleaved"),
    "sequence": ("whole", "parallel"),
    "precision": ("fp32", "bf16", "fp16"),
    "technique": ("all", "CB", "FE", "SC"),
}
COMBINATIONS = [Combination(*values) for values in itertools.product(*SETTINGS.values())]

# fp32: what the lossless limits are held to. Of a 16-bit message P and Q are rounded as well, once each, so a value
# gets two roundings more than vanilla's: in bf16 of 2^-9 of a gradient each, which Adam's first steps do not shrink.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}


def pairs(combination: Combination) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
    return itertools.combinations(enumerate(combination), 2)


def pairwise(combinations: Sequence[Combination]) -> list[Combination]:
    """The fewest combinations, found greedily, in which every pair of settings occurs."""
    missing, chosen = {pair for combination in combinations for pair in pairs(combination)}, []
    while missing:
        best = max(combinations, key=lambda combination: len(missing.intersection(pairs(combination))))
        missing -= set(pairs(best))
        chosen.append(best)
    return chosen


ALWAYS = pairwise(COMBINATIONS)


@pytest.fixture(scope="module")
def vanilla():
    """Losses of vanilla Megatron, each setting run once for all techniques."""
    known: dict[tuple[str, ...], list[float]] = {}

    def losses(combination: Combination) -> list[float]:
        world_size, layout_flags = combination.layout
        flags = (*layout_flags, *combination.flags)
        if flags not in known:
            known[flags] = last_stage_losses(run_megatron(world_size, flags))
        return known[flags]

    return losses


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(combination, id=", ".join(combination), marks=() if combination in ALWAYS else pytest.mark.full)
        for combination in sorted(COMBINATIONS, key=lambda combination: combination.flags)
    ],
)
def test_full_rank_reproduces_vanilla(vanilla, combination: Combination) -> None:
    expected = vanilla(combination)
    runs = run_optimus(combination.layout, [*combination.flags, *combination.techniques])
    assert relative_gap(last_stage_losses(runs), expected) < TOLERANCE[combination.precision]
    for run in runs:
        facts = run.probed
        if combination.technique in ("all", "CB"):
            assert all([*(facts["sent"] or ()), *(facts["received"] or ())]), "every message was compressed"
        assert (facts["compressed_matrices"] > 0) == (combination.technique in ("all", "SC"))
        raw, sent = facts["traffic"]["embedding"]
        assert (sent < raw) == (combination.technique in ("all", "FE"))


def test_the_subset_has_every_pair_of_settings() -> None:
    kinds = [[(index, value) for value in values] for index, values in enumerate(SETTINGS.values())]
    wanted = {pair for a, b in itertools.combinations(kinds, 2) for pair in itertools.product(a, b)}
    assert wanted <= {pair for combination in ALWAYS for pair in pairs(combination)}
    assert len(ALWAYS) < 20 and len(COMBINATIONS) == 192
