"""The trial of `balanced` in real steps: each way is what it says, ranks choose alike, and nothing is left over."""

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext.techniques import trial as trials
from tests.forked_ranks import run_ranks
from tests.megatron import interventions, own_loops
from tests.megatron import runs as table
from tests.megatron.specs import Layout, Run, RunSpec, full, uses
from tests.megatron_runs import last_stage_losses

SHARDED = {"use_distributed_optimizer": True, "in_bf16": True}
OVERLAPPED = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
STEPS = 9

# -- loops of one's own -----------------------------------------------------------------------------------------------


@contextmanager
def forced(dense: bool | None) -> Iterator[None]:
    """Force all steps of a trial, and its choice, to be dense or compressed. None forces nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if dense is not None:
            for name in ("dense", "gathers_dense"):
                patch.setattr(trials.WaysByTurns, name, property(lambda _: dense))
            patch.setattr(trials, "verdict", lambda *_: (not dense, "forced"))
        yield


def trained(layout: dict[str, Any], config: str | None = "balanced", dense: bool | None = None, **changes: Any) -> Any:
    """Train a model; return the bits of its gradients after each step, the choice, and the bytes of messages after the
    last step.
    """
    model = own_loops.build(2, **layout)
    optimizer = own_loops.optimizer_of(model)
    bits = []
    with forced(dense), optimus_cc_ext.compress(model, optimizer, config, **changes) as handle:
        for step in range(STEPS):
            own_loops.pass_of(model, batch=step)
            optimizer.step()
            bits.append(own_loops.digest(model))
        trial = None if handle._session is None else handle._session.trial
        gc.collect()
        messages = sum(
            each.nbytes for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.dtype == torch.uint8
        )
        return bits, trial and (trial.compressed, trial.ways.counted), messages


def all_ways(layout: dict[str, Any]) -> dict[str, Any]:
    """Train in every way, each rank on a node of its own."""
    os.environ["OPTIMUS_CC_NODE"] = "ranks:1"
    own_loops.start(2)
    return {
        "vanilla": trained(layout, None),
        "all dense": trained(layout, dense=True),
        "all compressed": trained(layout, dense=False),
        "no trial": trained(layout, compression_trial=False),
        "free": trained(layout),
    }


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, marks=pytest.mark.full, id="whole"),
        pytest.param(SHARDED, marks=pytest.mark.full, id="sharded"),
        pytest.param(OVERLAPPED, marks=pytest.mark.ci, id="overlapped"),
    ],
)
def test_forced_to_dense_it_is_vanilla_and_forced_to_compressed_it_is_no_trial_to_the_bit(
    layout: dict[str, Any],
) -> None:
    ranks = run_ranks(4, all_ways, layout, timeout=240)
    for rank in ranks:
        assert rank["all dense"][0] == rank["vanilla"][0]
        assert rank["all compressed"][0] == rank["no trial"][0] != rank["vanilla"][0]
        # Random generators have states of this dtype in vanilla, too.
        assert rank["all dense"][1:] == ((False, 6), rank["vanilla"][2]), "dense holds no messages"
        assert rank["all compressed"][1] == (True, 6) and rank["all compressed"][2] > rank["vanilla"][2]
        assert rank["free"][1] == ranks[0]["free"][1], "ranks choose alike"


def unended(announced: bool) -> tuple[list[str], bool | None]:
    """Run passes that no step ends; return the lines about the trial, and its choice."""
    os.environ["OPTIMUS_CC_NODE"] = "ranks:1"
    own_loops.start(2)
    model = own_loops.build(2)
    optimizer, said = own_loops.optimizer_of(model), []
    with pytest.MonkeyPatch.context() as patch, optimus_cc_ext.compress(model, optimizer, "balanced") as handle:
        patch.setattr(trials, "say", said.append)
        for _ in range(7):
            own_loops.pass_of(model)
        assert handle._session.trial is not None
        return said, handle._session.trial.compressed


@pytest.mark.full
def test_steps_that_nothing_ends_are_compressed() -> None:
    ranks = run_ranks(2, unended, True, timeout=120)
    assert ranks == [(["optimus-cc: no trial of balanced: no step ends. It stays on"], True), ([], True)]


# -- Megatron's loop --------------------------------------------------------------------------------------------------

TRIED = "--optimus-cc balanced --compression-trial"
NINE = "--train-iters 9 --lr-decay-iters 9"
_APART = (partial(interventions.nodes_of, 1),)


def four_ways(name: str, layout: Layout, flags: str, ours: str = "") -> tuple[RunSpec, ...]:
    """Return runs of vanilla, of a trial that is forced to each way, and of no trial."""
    vanilla = RunSpec(name=f"trial: {name}, vanilla", layout=layout, flags=flags)
    found = [vanilla]
    for dense in (True, False):
        found.append(vanilla.but(
            f"trial: {name}, {'dense' if dense else 'compressed'}", ours=f"{TRIED} {ours}",
            before=(*_APART, partial(interventions.forced_way, dense=dense)),
        ))  # fmt: skip
    return *found, vanilla.but(f"trial: {name}, none", ours=f"--optimus-cc balanced {ours}", before=_APART)


CASES = [
    four_ways("fp16, skipped first steps", table.PP2_DP2, "--fp16 --initial-loss-scale 4194304 --hysteresis 1 "
              f"--loss-scale-window 50 --train-iters 16 --lr-decay-iters 16 {table.SHARDED}"),
    four_ways("interleaved, both overlaps", table.PP2_DP2, f"{NINE} --bf16 {table.OVERLAPPED} {table.INTERLEAVED} "
              f"{table.SMALL_BUCKETS}"),
    four_ways("two instances", (4, ""), f"{NINE} --bf16 {table.OVERLAPPED} --num-distributed-optimizer-instances 2"),
    four_ways("experts, recomputed", (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
              f"{table.MIXTURE} --hidden-size 128 {NINE} {table.RECOMPUTED}", "--expert-dispatch-format int8"),
]  # fmt: skip


@uses(*(full(*case) for case in CASES))
def test_in_megatrons_loop_each_way_is_what_it_is_without_a_trial(runs: list[Run]) -> None:
    vanilla, dense, compressed, plain = runs
    kept = "--expert-dispatch-format" in dense.spec.ours
    for one, other, same in ((dense, vanilla, not kept), (compressed, plain, True)):
        assert any("forced" in line for line in one.said), "it was decided"
        assert same == (last_stage_losses(one.ranks) == last_stage_losses(other.ranks))
        assert same == all(a.weights == b.weights for a, b in zip(one.ranks, other.ranks, strict=True))
    assert last_stage_losses(vanilla.ranks) != last_stage_losses(compressed.ranks)


def _saved(name: str, *before: Any, iterations: int = 14) -> RunSpec:
    return RunSpec(
        name=name, ours=TRIED, before=(*_APART, *before),
        flags=f"--ckpt-format torch --bf16 {table.OVERLAPPED} --train-iters {iterations} --lr-decay-iters 14 "
        "--save {here} --save-interval 5",
    )  # fmt: skip


_D, _A = ([seconds[letter] for letter in "DAADDA" * 2] for seconds in ({"D": 1.0, "A": 2.0}, {"D": 2.0, "A": 1.0}))
WHOLE = _saved("trial, saved", partial(interventions.chosen_way, _D))
_FASTER = (*_APART, partial(interventions.chosen_way, _A))
AFTER = replace(table.resumed(WHOLE, 10), before=_FASTER)
INSIDE = replace(table.resumed(WHOLE, 5), before=_FASTER)


@uses(full(WHOLE, AFTER, INSIDE))
def test_a_checkpoint_keeps_the_choice_and_one_from_inside_of_the_trial_has_none(runs: list[Run]) -> None:
    whole, after, inside = runs
    (chosen,) = [line for line in whole.said if line.startswith("iterations 3 to 8: dense 1 s (1 to 1), balanced 2 s")]
    assert "dense from now on" in chosen
    assert "the trial of the checkpoint's run counts here, too: dense" in " ".join(after.said)
    assert last_stage_losses(after.ranks) == last_stage_losses(whole.ranks)[10:]
    assert not [line for line in after.said if line.startswith("iterations")]
    (anew,) = [line for line in inside.said if line.startswith("iterations 8 to 13: dense 2 s (2 to 2), balanced 1 s")]
    cost = re.search(r"balanced stays on; balanced: up to ([\d.]+) of ([\d.]+) MB .+, and ([\d.]+) MB of memory", anew)
    assert cost is not None and 0.1 < float(cost[1]) < 0.8 * float(cost[2]) and float(cost[3]) > 0
