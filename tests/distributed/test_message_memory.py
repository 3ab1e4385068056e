"""Memory for messages: gradients and parameters of a bucket share it."""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import DP_GRADIENTS, PARAM_GATHER
from optimus_cc_ext.techniques.bucket import Bucket
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.param_gather import ParamGather
from optimus_cc_ext.techniques.selective_stage_compression import SelectiveStageCompression
from tests.forked_ranks import run_ranks


class Shared(NamedTuple):
    """A bucket's parameters and gradients after two steps, and the bytes of each ring."""

    parameters: torch.Tensor
    gradients: torch.Tensor
    announced: list[int]
    allocated: list[int]


class _Bucket(NamedTuple):
    """A bucket, with Megatron's names."""

    grad_data: torch.Tensor
    param_data: torch.Tensor


def _one_memory(*, shared: bool) -> Shared:
    """Encode a step's change of a bucket, gather the parameters, reduce the gradients, and gather once more.

    `shared`: messages of gradients and of parameters use one memory.
    """
    dist.init_process_group("gloo")
    config = OptimusConfig(dp_compression_format="int8", param_gather_format="int8")
    rings = [Ring()] * 2 if shared else [Ring(), Ring()]
    technique = SelectiveStageCompression(config, DP_GRADIENTS, rings[0])
    gathers = ParamGather(config, PARAM_GATHER, rings[1])
    technique.take_stage(0, 2)
    record = BucketRecord(
        numel=4096, dtype=torch.float32, parameters=[ParameterRecord(shape=(60, 64), start=0)],
        parameter_dtype=torch.bfloat16,
    )  # fmt: skip
    plan = GroupPlan.of([record], BucketRules(ranks=2, sharded=True, format="int8", gathered="int8"))
    [bucket] = plan.buckets
    assert bucket.gather is not None and bucket.compressed is not None
    assert bucket.gather.layouts is bucket.compressed.layouts, "one layout, so that kernels have one table"
    seeded = torch.Generator().manual_seed(dist.get_rank())
    gradients, weights = torch.randn(4096, generator=seeded), torch.ones(4096, dtype=torch.bfloat16)
    groups = Groups(dist.group.WORLD)
    of_megatron = SimpleNamespace(buckets=[_Bucket(gradients, weights)])
    found = Bucket(of_megatron, 0, record, gradients.device)
    group = technique.add_group(plan, [found], groups, overlapped=False, fused=None)
    shards = gathers.add_bucket(found, bucket.gather, groups)
    kept = shards.nbytes
    gathers.update(of_megatron.buckets, lambda _, start, end: weights[start:end].add_(0.5))
    gathers.gather([shards]).wait()
    group.start(group.reducers, group.gradients, whole=False).wait()
    gathers.update(of_megatron.buckets, lambda _, start, end: weights[start:end].add_(gradients[start:end]))
    gathers.gather([shards]).wait()
    assert kept + shards.change_bytes == gathers.message_bytes and technique.message_bytes == 0
    return Shared(
        weights, gradients.view(2, -1)[dist.get_rank()].clone(),
        [ring.nbytes for ring in rings], [sum(slot.nbytes for slot in ring._free) for ring in rings],
    )  # fmt: skip


def test_gradients_and_parameters_of_a_bucket_use_one_memory_for_their_messages() -> None:
    for one, two in zip(
        run_ranks(2, partial(_one_memory, shared=True)),
        run_ranks(2, partial(_one_memory, shared=False)),
        strict=True,
    ):
        assert torch.equal(one.parameters, two.parameters) and torch.equal(one.gradients, two.gradients)
        assert one.announced == one.allocated and two.announced == two.allocated
        assert one.allocated == [max(two.allocated)] * 2 and min(two.allocated) > 0
