"""Law: messages in slices change no bit of a run: with the least memory for messages, losses, gradients, weights and
compression state are those of runs in which each bucket is one message, whatever is summed or gathered, and how.
"""

from functools import partial

from tests.megatron import interventions, recording
from tests.megatron import runs as table
from tests.megatron.runs import INTERLEAVED, OVERLAPPED, PP2_DP2, SHARDED
from tests.megatron.specs import Layout, RunSpec, full, in_ci, uses
from tests.megatron.test_two_levels import DP4

WIDE = "--hidden-size 192 --vocab-size 2000 --micro-batch-size 1 --global-batch-size 8 --train-iters 3"
"""A model whose buckets need more than the four slots of 0.25 MB of `--message-memory 1`."""

BUCKETS = "--ddp-bucket-size 1000000"
INT8, INT4 = "--dp-compression-format int8", "--dp-compression-format int4"
GATHERED = "--param-gather-format int4"
IN_FP32 = "--grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation"
TWO = "--num-distributed-optimizer-instances 2"
SUMS, GATHER, EMBEDDING = "DP gradients", "parameter gather", "embedding"

CUT: dict[str, tuple[str, ...]] = {}
"""Classes of traffic that slices cut, by the name of the run without slices."""


def pair(
    name: str, ours: str, *cut: str, layout: Layout = PP2_DP2, flags: str = "", members: int = 1
) -> tuple[RunSpec, RunSpec]:
    """Return a run with whole messages, and one in which messages of the classes `cut` are sent in slices; a node has
    `members` ranks.
    """
    whole = RunSpec(
        name=f"whole messages: {name}", layout=layout, flags=f"{WIDE} {flags}", ours=ours,
        before=(partial(interventions.nodes_of, members),), probe=recording.slices,
    )  # fmt: skip
    CUT[whole.name] = cut
    return whole, whole.but(f"slices: {name}", ours="--message-memory 1")


SHARDS = pair(
    "shards and gathers, overlapped", f"{INT8} {GATHERED}", SUMS, GATHER, flags=f"--bf16 {OVERLAPPED} {BUCKETS}"
)
MORE = [
    pair("low rank with its state", f"{table.LOSSY} {GATHERED}", GATHER, flags=f"--bf16 {OVERLAPPED} {BUCKETS}"),
    pair("aligned gathers", f"{INT8} {GATHERED}", SUMS, GATHER, flags=f"--bf16 {OVERLAPPED} {INTERLEAVED}"),
    pair("instances", f"{INT8} {GATHERED}", SUMS, GATHER, layout=DP4, flags=f"--bf16 {OVERLAPPED} {TWO}", members=2),
    pair("two levels, whole gradients", INT8, SUMS, layout=DP4, members=2),
    pair("exact gathers", "--param-gather-format exact", GATHER, flags=f"--bf16 {OVERLAPPED} {BUCKETS}"),
    pair("two levels in fp32", INT8, SUMS, layout=DP4, flags=f"--bf16 {OVERLAPPED} {IN_FP32}", members=2),
    pair("whole gradients, overlapped", INT4, SUMS, flags=f"--overlap-grad-reduce {BUCKETS}"),
    pair("two levels", INT8, SUMS, layout=DP4, flags=f"--bf16 {OVERLAPPED} {BUCKETS}", members=2),
    pair(
        "experts", f"{INT8} {GATHERED}", SUMS, GATHER, layout=DP4,
        flags=f"{table.MIXTURE} --train-iters 3 --moe-ffn-hidden-size 192 --expert-model-parallel-size 2 "
        f"--bf16 {OVERLAPPED}",
    ),
    pair("a tied embedding", f"{INT8} --fused-embedding-sync-format int8", SUMS, EMBEDDING),
    pair("shards and gathers at once", f"{INT4} --param-gather-format int8", SUMS, GATHER, flags=f"--bf16 {SHARDED}"),
    pair("whole gradients", INT8, SUMS),
    pair("balanced", f"{table.BALANCED} --lazy-error-propagation", SUMS, GATHER, flags=f"--bf16 {OVERLAPPED}"),
]  # fmt: skip


@uses(in_ci(*SHARDS), *(full(*each) for each in MORE))
def test_slices_change_no_bit_of_a_run(runs):
    whole, sliced = runs
    for one, other in zip(whole.ranks, sliced.ranks, strict=True):
        assert set(one.probed.values()) == {1}
        assert all(other.probed[tag] > 1 for tag in CUT[whole.spec.name]), other.probed
        for name in ("losses", "grad_norms", "gradients", "weights", "steps", "random_states"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.ours.remembered == other.ours.remembered
