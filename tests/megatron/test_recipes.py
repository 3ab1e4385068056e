"""Training with options of current recipes: compressed messages that lose nothing reproduce vanilla's losses."""

from importlib.util import find_spec

import pytest

from optimus_cc_ext.config.classes import CLASSES
from scripts.compat import cpu_attention
from tests.megatron.runs import (
    BALANCED,
    BF16_BUCKETS,
    EXACT_BLOCKS,
    GATHER,
    INTERLEAVED,
    MIXTURE,
    OVERLAPPED,
    PP2,
    TOLERANCE,
    TWENTY,
    Limit,
)
from tests.megatron.specs import Run, RunSpec, full, uses
from tests.megatron_runs import last_stage_losses, relative_gap

_ROPE = "--position-embedding-type rope --no-rope-fusion --train-iters 5"
CP2_PP2 = Limit(
    vanilla=RunSpec(
        name="context parallel, 2 stages", layout=(4, f"{PP2[1]} --context-parallel-size 2"), flags=_ROPE,
        before=(cpu_attention.install,),
    ),
    ours=EXACT_BLOCKS,
)  # fmt: skip
CP2_DP2 = Limit(
    vanilla=RunSpec(
        name="context parallel, sharded", layout=(4, "--context-parallel-size 2"), flags=f"{_ROPE} {OVERLAPPED}",
        before=(cpu_attention.install,),
    ),
    ours=EXACT_BLOCKS,
)  # fmt: skip
# A change of a parameter is rounded to bf16 before it is added, as the parameter is in vanilla after the addition.
CP2_GATHER = Limit(
    vanilla=CP2_DP2.vanilla.but("context parallel, bf16, sharded", flags="--bf16"), ours=f"{GATHER} --exact-blocks",
    loss=BF16_BUCKETS[0], norm=BF16_BUCKETS[1],
)  # fmt: skip
MTP_TIED = Limit(vanilla=RunSpec(name="multi-token prediction", flags=f"{_ROPE} --mtp-num-layers 1"))
MTP_UNTIED = Limit(
    vanilla=MTP_TIED.vanilla.but("multi-token prediction, untied", flags="--untie-embeddings-and-output-weights")
)
# Fused embedding synchronisation is off: it sums in another order, and Muon amplifies rounding.
MUON = Limit(
    vanilla=RunSpec(name="Muon", flags=f"{_ROPE} --optimizer muon"), ours=f"{EXACT_BLOCKS} --no-fused-embedding-sync"
)
FLUSHED = Limit(
    vanilla=RunSpec(
        name="overlapped warm-up and flush", flags=f"{INTERLEAVED} --overlap-p2p-communication-warmup-flush {_ROPE}"
    ),
)
EXPERTS_CP2 = Limit(
    vanilla=CP2_PP2.vanilla.but("context parallel experts", flags=f"{MIXTURE} --expert-model-parallel-size 2"),
    ours=EXACT_BLOCKS,
)
UNEVEN = Limit(vanilla=RunSpec(name="uneven layout", flags=f"{_ROPE} --pipeline-model-parallel-layout Ettt|tL"))
TRAINED = [
    limit.vanilla.but(f"{limit.vanilla.name}, 20 iterations", flags=TWENTY)
    for limit in (CP2_PP2, CP2_GATHER, MTP_TIED, MTP_UNTIED, FLUSHED, EXPERTS_CP2, UNEVEN)
]
TRAINED_BY_MUON = MUON.vanilla.but("Muon, 20 iterations", flags=TWENTY)
needs_muon = pytest.mark.skipif(
    find_spec("emerging_optimizers") is None, reason="pip install --no-deps emerging-optimizers absl-py"
)


def case(limit: Limit) -> tuple[Run, Run]:
    return limit.vanilla, limit.run  # type: ignore[return-value]


def assert_like_vanilla(
    vanilla: Run, ours: Run, *classes: str, loss: float = TOLERANCE, norm: float = TOLERANCE
) -> None:
    """Assert that losses and norms are vanilla's up to rounding, and that messages of these classes were compressed."""
    assert relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < loss
    norms, expected = ([norm or 0.0 for norm in run.ranks[0].grad_norms] for run in (ours, vanilla))
    assert relative_gap(norms, expected) < norm
    traffic = {name: [rank.ours.traffic[name] for rank in ours.ranks] for name in classes}
    for name, counted in traffic.items():
        raw, sent = (sum(both) for both in zip(*counted, strict=True))
        assert raw > 0 and sent != raw, name


@uses(full(*case(CP2_PP2)))
def test_replicas_of_context_parallelism_reduce_compressed_gradients_and_messages_are_as_long_as_their_part(runs):
    vanilla, ours = runs
    assert_like_vanilla(vanilla, ours, "pipeline forward", "pipeline backward", "DP gradients", "embedding")
    for rank in ours.ranks:
        assert all(all(step) for end in rank.messages.values() for step in end.history) and rank.messages
    # One gradient message has sequence / CP x micro-batch x hidden values in fp32; 2 context-parallel ranks send 8
    # micro-batches.
    raw = sum(rank.ours.traffic["pipeline backward"][0] for rank in ours.ranks)
    assert raw == 5 * 8 * 2 * (64 // 2) * 2 * 64 * 4


@uses(full(*case(CP2_DP2)), full(*case(CP2_GATHER)))
def test_the_distributed_optimizers_shards_are_those_of_replicas_of_context_parallelism(runs):
    limit, sent = (CP2_GATHER, "parameter gather") if "--bf16" in runs[0].spec.flags else (CP2_DP2, "DP gradients")
    assert_like_vanilla(*runs, sent, loss=limit.loss, norm=limit.norm)


@uses(full(*case(MTP_TIED)), full(*case(MTP_UNTIED)))
def test_with_multi_token_prediction_the_embedding_is_summed_once_over_its_two_copies(runs):
    vanilla, ours = runs
    assert_like_vanilla(vanilla, ours, "pipeline backward", "DP gradients", "embedding")
    for rank in ours.ranks:
        assert [name for name, _ in rank.ours.groups] == ["OPTIMUS_CC_ALONE", "OPTIMUS_CC_EMBEDDING"]


@uses(full(*case(FLUSHED)))
def test_with_overlapped_warm_up_and_flush_every_class_is_vanillas(runs):
    assert_like_vanilla(*runs, "pipeline backward", "DP gradients", "embedding")


@uses(full(*case(EXPERTS_CP2)), full(*case(UNEVEN)))
def test_experts_beside_context_parallelism_and_uneven_stages_are_vanillas(runs):
    assert_like_vanilla(*runs, "pipeline backward", "DP gradients", "embedding")


def balanced(run: RunSpec) -> tuple[RunSpec, RunSpec]:
    return run, run.but(f"{run.name}, balanced", ours=BALANCED)


def assert_near_vanilla(vanilla: Run, ours: Run) -> None:
    """Assert that the last loss is within 2 % of vanilla's, and that the classes which balanced compresses are smaller.

    Tokens on their way to experts stay dense.
    """
    assert relative_gap(last_stage_losses(ours.ranks)[-1:], last_stage_losses(vanilla.ranks)[-1:]) < 0.02
    compressed = {traffic.tag for traffic in CLASSES if "balanced" in traffic.presets}
    traffic = [counts for rank in ours.ranks for tag, counts in rank.ours.traffic.items() if tag in compressed]
    assert sum(sent for _, sent in traffic) < 0.6 * sum(raw for raw, _ in traffic)


@uses(*(full(*balanced(run)) for run in TRAINED))
def test_balanced_compresses_and_ends_within_two_percent_of_vanilla(runs):
    assert_near_vanilla(*runs)


@needs_muon
@uses(full(*balanced(TRAINED_BY_MUON)))
def test_balanced_beside_muon_ends_within_two_percent_of_vanilla(runs):
    assert_near_vanilla(*runs)


@needs_muon
@uses(full(*case(MUON)))
def test_muon_without_a_sharded_optimizer_steps_as_in_vanilla(runs):
    assert_like_vanilla(*runs, "pipeline backward", "DP gradients")
