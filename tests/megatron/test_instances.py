"""Several instances of the distributed optimizer: the sums between instances are compressed, and nothing else."""

import pytest

from tests.megatron import runs as table
from tests.megatron.runs import Limit
from tests.megatron.specs import RunSpec, full, uses
from tests.megatron.test_checkpoints import assert_goes_on
from tests.megatron.test_two_levels import BF16, DP4, DP8, EXACT, NORMS, PP2_DP4, on_nodes
from tests.megatron_runs import last_stage_losses, relative_gap

pytest.importorskip("einops", reason="Megatron needs einops for several instances")

TWO = "--num-distributed-optimizer-instances 2"
UNTIED = f"--train-iters 5 {table.SHARDED} {TWO} --untie-embeddings-and-output-weights"
OVERLAPPED = f"{UNTIED} --overlap-grad-reduce --overlap-param-gather {table.SMALL_BUCKETS}"
LOW_RANK = "--dp-compression --dp-compression-rank 256 --force-compression"


def limit(
    name: str, layout: table.Layout, flags: str, ours: str = EXACT, members: int = 2, **tolerances: float
) -> Limit:  # fmt: skip
    return Limit(vanilla=on_nodes(f"instances: {name}", members, layout, flags), ours=ours, **tolerances)


OVERLAP = limit("overlapped", DP4, OVERLAPPED)
MORE = [
    limit("at once", DP4, UNTIED),
    limit("averages in the collective", DP4, f"{OVERLAPPED} --ddp-average-in-collective"),
    limit("across nodes", DP8, OVERLAPPED),
    limit("bf16", DP4, f"{OVERLAPPED} --bf16 --grad-reduce-in-bf16", **BF16),
    limit("experts", DP8, f"{table.MIXTURE} {OVERLAPPED} --expert-model-parallel-size 2", members=4),
    limit(
        "a tied embedding", PP2_DP4, f"--train-iters 5 {table.SHARDED} {TWO}",
        f"{EXACT} --fused-embedding-sync-format int8",
    ),
    # This case and the next one do not overlap: with overlap Megatron 0.19.2 reduces the gradients of all stages but
    # the first twice in its first step (schedules.py calls `grad_sync_func`, and `finish_grad_sync` finds no handle
    # that shows that the reduction has begun).
    limit(
        "a tied embedding alone", PP2_DP4, f"--train-iters 5 {table.SHARDED} {TWO}",
        "--fused-embedding-sync-format int8 --exact-blocks",
    ),
    limit("a dense tied embedding", PP2_DP4, f"--train-iters 5 {table.SHARDED} {TWO}", "--fused-embedding-sync"),
    limit("low rank", DP4, OVERLAPPED, LOW_RANK),
]  # fmt: skip
LIMITS = {each.run.name: each for each in (OVERLAP, *MORE)}


@uses(*(full(each.vanilla, each.run) for each in (OVERLAP, *MORE)))
def test_exact_messages_between_instances_reproduce_vanilla(runs):
    vanilla, ours = runs
    tolerance = LIMITS[ours.spec.name]
    assert relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < tolerance.loss
    norms, expected = ([norm or 0.0 for norm in run.ranks[0].grad_norms[:NORMS]] for run in (ours, vanilla))
    assert relative_gap(norms, expected) < tolerance.norm
    if "--dp-compression" in tolerance.ours:
        assert all(rank.ours.compressed_matrices for rank in ours.ranks)


LOSSY = on_nodes("instances: int4", 2, DP4, f"{OVERLAPPED} --bf16", "--dp-compression-format int4")


@pytest.mark.ci
@uses(LOSSY)
def test_replicas_stay_bit_identical_across_instances_and_few_bytes_leave_a_node(runs):
    assert len({tuple(sorted(rank.weights.items())) for rank in runs.ranks}) == 1
    line = "in the levels of 2 distributed-optimizer instances: 2 replicas of an instance are summed dense"
    assert sum(line in said for said in runs.said) == 1
    for rank in runs.ranks:
        raw, sent = rank.ours.leaving
        # Each rank exchanges its half of the values with the other instance. Vanilla's all-reduce over 2 ranks sends
        # each of these values once, in 4 bytes. Compressed, a reduce-scatter and a gather send half of them each, in
        # 0.52 and 1.02 bytes.
        share = (0.52 + 1.02) / 2 / 4
        assert share < sent / raw < 1.2 * share


_SAVED = table.saving(
    "instances", f"--ckpt-format torch --bf16 {table.OVERLAPPED} {TWO}", "--dp-compression-format int4", layout=DP4
)


@uses(full(_SAVED, table.resumed(_SAVED, 4)))
def test_a_run_with_several_instances_resumes_to_the_bit(runs):
    whole, part = runs
    assert_goes_on(part, whole, 4)


GATHERED = RunSpec(
    name="instances: balanced inside nodes", layout=DP4, flags=f"{OVERLAPPED} --bf16", ours=table.BALANCED,
    before=LOSSY.before,
)  # fmt: skip


@uses(full(GATHERED))
def test_balanced_gathers_parameters_dense_inside_an_instance_that_is_a_node(runs):
    for rank in runs.ranks:
        raw, sent = rank.ours.traffic["parameter gather"]
        assert raw == sent > 0
        raw, sent = rank.ours.traffic["DP gradients"]
        assert 0 < sent < raw
