"""Memory for messages: gradients and parameters of a bucket share it."""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.messages import BlockCodecs, MessagePool
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.bucket import Bucket
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.param_gather import ParamGather
from optimus_cc_ext.techniques.selective_stage_compression import SelectiveStageCompression
from tests.forked_ranks import run_ranks


class Shared(NamedTuple):
    """A bucket's parameters and gradients, the bytes of the gather's messages, and those of all memory."""

    parameters: torch.Tensor
    gradients: torch.Tensor
    gather_bytes: int
    announced: int


class _Bucket(NamedTuple):
    """A bucket, with Megatron's names."""

    grad_data: torch.Tensor
    param_data: torch.Tensor


def _one_memory(*, shared: bool) -> Shared:
    """Encode a step's change of a bucket, gather the parameters, reduce the gradients, and gather once more.

    `shared`: messages of gradients and of parameters use one memory.
    """
    dist.init_process_group("gloo")
    config = DataParallelCompressionConfig(
        dp_compression_format="int8", dp_compression_stages="all"
    )  # fmt: skip
    codecs = BlockCodecs.of("int8", lambda name: fast_codec(name, seed=1, rotated=True))
    assert codecs is not None
    pools = [MessagePool()] * 2 if shared else [MessagePool(), MessagePool()]
    technique = SelectiveStageCompression(
        config, FastLowRank(), seed=1, state_dtype=torch.float32, codecs=codecs, pool=pools[0]
    )  # fmt: skip
    gathers = ParamGather(codecs.gradients, pools[1])
    technique.take_stage(0, 2)
    record = BucketRecord(
        numel=4096, dtype=torch.float32, parameters=[ParameterRecord(shape=(60, 64), start=0)],
        parameter_dtype=torch.bfloat16,
    )  # fmt: skip
    plan = GroupPlan.of([record], BucketRules(ranks=2, sharded=True, format="int8", gathered="int8"))
    [bucket] = plan.buckets
    assert bucket.gather is not None and bucket.compressed is not None
    assert bucket.gather.layout is bucket.compressed.layout, "one layout, so that kernels have one table"
    seeded = torch.Generator().manual_seed(dist.get_rank())
    gradients, weights = torch.randn(4096, generator=seeded), torch.ones(4096, dtype=torch.bfloat16)
    groups = Groups(dist.group.WORLD)
    of_megatron = SimpleNamespace(buckets=[_Bucket(gradients, weights)])
    found = Bucket(of_megatron, 0, record, gradients.device)
    group = technique.add_group(plan, [found], groups, overlapped=False, fused=None)
    shards = gathers.add_bucket(found, bucket.gather, groups)
    message, _ = bucket.gather.message_bytes
    own = weights.view(2, -1)[dist.get_rank()]
    with gathers.updating(of_megatron.buckets):
        own.add_(0.5)
    gathers.gather([shards]).wait()
    group.start(group.reducers, group.gradients, whole=False).wait()
    with gathers.updating(of_megatron.buckets):
        own.add_(gradients.view(2, -1)[dist.get_rank()])
    gathers.gather([shards]).wait()
    said = technique.message_bytes + gathers.message_bytes + (0 if shared else pools[1].nbytes)
    return Shared(weights, gradients.view(2, -1)[dist.get_rank()].clone(), 2 * message, said)


def test_gradients_and_parameters_of_a_bucket_use_one_memory_for_their_messages() -> None:
    for one, two in zip(
        run_ranks(2, partial(_one_memory, shared=True)),
        run_ranks(2, partial(_one_memory, shared=False)),
        strict=True,
    ):
        assert torch.equal(one.parameters, two.parameters) and torch.equal(one.gradients, two.gradients)
        assert two.announced == one.announced + one.gather_bytes
