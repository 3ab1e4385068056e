"""Law: nothing keeps a copy of the shard. Megatron's optimizer copies its master values slice by slice, and parameters
are those of one message to the bit; a copy that fails leaves parameters and optimizer as they were.
"""

from typing import Any, NamedTuple

import pytest

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops
from tests.megatron.recording import hash_of

LISTS = (
    "shard_fp32_from_float16_groups", "model_float16_groups", "shard_fp32_groups", "model_fp32_groups",
)  # fmt: skip


class Found(NamedTuple):
    """State of a rank after three steps."""

    weights: str
    slices: int
    """Number of slices of the rank's largest bucket."""

    copied: int
    """Bytes of old values that are kept at once."""

    shard: int
    unchanged: bool
    """True if a failing copy left parameters and optimizer as they were."""


def trained(megabytes: int, experts: int | None, overlapped: bool) -> Found:
    """Train with messages in so much memory; a fourth step fails in Megatron's copy of the second parameter."""
    own_loops.start(1, 2 if experts else 1)
    ddp = {"use_distributed_optimizer": True, "overlap_param_gather": overlapped, "overlap_grad_reduce": overlapped}
    model = own_loops.build(1, in_bf16=True, hidden=128, experts=experts, **ddp)
    optimizer = own_loops.optimizer_of(model)
    config = OptimusConfig(param_gather_format="int8", message_memory=megabytes, compression_seed=1)
    handle = optimus_cc_ext.compress(model, optimizer, config)
    parameters = handle._compressing.parameters
    for _ in range(3):
        own_loops.pass_of(model)
        optimizer.step()
    own_loops.pass_of(model)
    weights = "".join(hash_of(parameter.data) for parameter in model.parameters())
    inner = optimizer.chained_optimizers[0]
    kept = {name: getattr(inner, name) for name in LISTS}
    copied = list[Any]()

    def fails(parameter: Any) -> bool:
        copied.append(parameter)
        if len(copied) == 2:
            raise RuntimeError("no second copy")
        return False

    inner._is_distopt_quantized_param = fails
    with pytest.raises(RuntimeError, match="no second copy"):
        optimizer.step()
    unchanged = weights == "".join(hash_of(parameter.data) for parameter in model.parameters())
    unchanged &= all(getattr(inner, name) is value for name, value in kept.items())
    unchanged &= "_get_model_param_range_map" not in vars(inner)
    largest = max(parameters.buckets, key=lambda shards: shards.plan.numel)
    shard = largest.plan.numel // largest.plan.ranks * largest.plan.dtype.itemsize
    scratch = parameters.scratch.nbytes
    return Found(weights, len(largest.plan.layouts), scratch, shard, unchanged)


@pytest.mark.parametrize(("experts", "overlapped"), [(None, True), (4, False)], ids=["overlapped", "experts"])
def test_masters_are_copied_slice_by_slice_to_the_same_bits(experts: int | None, overlapped: bool) -> None:
    one = run_ranks(2, trained, 256, experts, overlapped, timeout=90)
    many = run_ranks(2, trained, 1, experts, overlapped, timeout=90)
    for whole, cut in zip(one, many, strict=True):
        assert whole.slices == 1 and cut.slices > 1
        assert cut.weights == whole.weights
        assert cut.copied < 0.8 * whole.shard
        assert whole.unchanged and cut.unchanged
