"""Megatron over the backend of ranks that share a GPU, with CPU tensors: losses and weights are those over gloo."""

from dataclasses import replace

from tests.megatron import interventions
from tests.megatron.runs import LOSSY, LOSSY_RUN, OVERLAPPED, SMALL_BUCKETS, TP2_PP2_DP2
from tests.megatron.specs import RunSpec, full, uses

SHARDED_RUN = RunSpec(
    name="TP2, bf16, sharded, overlapped", layout=TP2_PP2_DP2, ours=LOSSY,
    flags=f"--bf16 {OVERLAPPED} {SMALL_BUCKETS} --sequence-parallel",
)  # fmt: skip


def staged(run: RunSpec) -> RunSpec:
    return replace(run, name=f"{run.name}, staged", before=(interventions.over_the_shared_gpus_backend,))


@uses((LOSSY_RUN, staged(LOSSY_RUN)), full(SHARDED_RUN, staged(SHARDED_RUN)))
def test_a_run_over_the_staged_backend_is_bit_identical_to_gloos(runs):
    for gloos, ours in zip(*(run.ranks for run in runs), strict=True):
        assert (ours.losses, ours.grad_norms, ours.weights) == (gloos.losses, gloos.grad_norms, gloos.weights)
        assert len(ours.losses) >= 4 and ours.weights
