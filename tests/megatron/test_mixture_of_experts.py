"""Mixture of experts, with and without expert parallelism, tied and untied: routed experts are dense, the rest as
usual.
"""

from datetime import timedelta

import pytest

from tests.launches import launch
from tests.megatron.runs import (
    EXPERTS_ALONE,
    EXPERTS_ALONE_IN_BLOCKS,
    EXPERTS_AMONG_OTHERS,
    EXPERTS_APART,
    EXPERTS_REPLICATED,
    ONE_REPLICA,
    TOLERANCE,
)
from tests.megatron.specs import Run, full, in_ci, uses
from tests.megatron_runs import last_stage_losses, relative_gap

pytestmark = pytest.mark.ci

# A stage's 2 layers have, beside the experts', 2 attention matrices and a router each.
COMPRESSED = 6


def assert_lossless(vanilla: Run, ours: Run) -> None:
    assert relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < TOLERANCE
    # Adam hides a wrong scale of gradients, but norms show it. Routing is discrete: in later iterations rounding can
    # send a token to another expert, which changes norms by about 1e-4; a wrong scale would change them by a factor.
    first, *later = zip(ours.ranks[0].grad_norms, vanilla.ranks[0].grad_norms, strict=True)
    assert relative_gap(*([norm] for norm in first)) < TOLERANCE
    assert relative_gap(*zip(*later, strict=True)) < 1e-3
    for rank in ours.ranks:
        assert all(all(step) for end in rank.messages.values() for step in end.history) and rank.messages
        # The first stage has the position embedding as well.
        assert rank.ours.compressed_matrices == COMPRESSED + (rank.stage == 0)


@uses(full(EXPERTS_APART.vanilla, EXPERTS_APART.run))
def test_experts_in_groups_of_their_own_stay_dense_and_our_groups_have_names_and_megatrons_timeout(runs):
    vanilla, ours = runs
    assert_lossless(vanilla, ours)
    for rank in ours.ranks:
        assert rank.expert_buckets > 0
        seven = timedelta(minutes=7)
        assert rank.ours.groups == [("OPTIMUS_CC_ALONE", seven), ("OPTIMUS_CC_EMBEDDING", seven)]


@pytest.mark.full
@uses((EXPERTS_AMONG_OTHERS.vanilla, EXPERTS_AMONG_OTHERS.run))
def test_experts_among_the_others_stay_dense(runs):
    vanilla, ours = runs
    assert_lossless(vanilla, ours)
    for rank in ours.ranks:
        assert rank.expert_buckets == 0
        assert rank.ours.traffic["embedding"] == (0, 0)
        assert [name for name, _ in rank.ours.groups] == ["OPTIMUS_CC_ALONE"]


def test_untied_models_do_without_fused_embedding_sync():
    said = launch(EXPERTS_AMONG_OTHERS.run.argv.split())
    assert said.accepted
    assert "optimus-cc: --optimus-cc leaves out embedding: the embeddings are not tied" in said.ours


@uses(EXPERTS_REPLICATED)
def test_traffic_of_experts_is_counted_over_their_own_replicas(runs):
    for rank in runs.ranks:
        experts = sum(nbytes for name, nbytes in rank.gradient_bytes.items() if ".experts." in name)
        others = sum(rank.gradient_bytes.values()) - experts
        raw, sent = rank.ours.traffic["DP gradients"]
        # D replicas send 2 (D - 1) / D of a gradient's bytes in each of 2 iterations: D is 2 for experts, 4 for all
        # other parameters.
        assert raw == 2 * (others * 3 / 2 + experts)
        assert 0 < sent < raw


@uses(in_ci(EXPERTS_ALONE, EXPERTS_ALONE_IN_BLOCKS))
def test_experts_with_one_replica_keep_their_gradients_to_the_bit_and_the_log_names_them(runs):
    vanilla, ours = runs
    for rank, plain in zip(ours.ranks, vanilla.ranks, strict=True):
        assert rank.expert_buckets > 0
        routed = {name for name in plain.gradients if ".experts." in name}
        attention = {name for name in plain.gradients if "attention" in name and name.endswith("weight")}
        assert routed and attention
        assert {name for name in routed if rank.gradients[name] != plain.gradients[name]} == set()
        assert {name for name in attention if rank.gradients[name] == plain.gradients[name]} == set()
    assert [line for line in ours.said if "one rank" in line] == [
        "dense, because their data-parallel group is one rank and nothing is sent: gradients of routed experts"
    ]


@uses(ONE_REPLICA)
def test_a_tied_embedding_with_one_replica_is_coded_between_its_stages_only(runs):
    for rank in runs.ranks:
        raw, sent = rank.ours.traffic["embedding"]
        assert 0 < sent < 0.14 * raw, "int4 between the stages"
        assert rank.ours.compressed_matrices == 0
    assert [line for line in runs.said if "one rank" in line] == [
        "dense, because their data-parallel group is one rank and nothing is sent: gradients of the tied embedding"
    ]
