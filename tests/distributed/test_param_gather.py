"""Parameter gather in blocks of few bits over real ranks, compared with a literal computation, shard by shard."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Span, reduce_scatter
from optimus_cc_ext.collectives.ranges import Range
from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import PARAM_GATHER
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.bucket import Bucket as MegatronBucket
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, gather_plan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.param_gather import ParamGather, Shards
from tests.allocations import Watch
from tests.distributed.buckets import Bucket
from tests.forked_ranks import run_ranks
from tests.formats import formats_of

# Some matrices do not fill their last block, and are followed by matrices and by vectors. The shards of the ranks begin
# and end inside of matrices, of vectors and of the padding.
SHAPES = [(48, 32), (96, 32), (7,), (5, 9), (3, 11), (32,), (32, 64), (3, 4, 5), (48,)]
RANKS, STEPS = 3, 4
UPDATE = 1e-2
"""Size of a step's update of weights of size 1: two units in the last place of bf16."""


def codec(format: str) -> Codec:
    return fast_codec(format, seed=1, rotated=True)


def weights(dtype: torch.dtype) -> Bucket:
    """Make weights that are the same on every rank."""
    bucket = Bucket(SHAPES, parts=6 * 64, dtype=dtype)
    for view in bucket.views:
        view.normal_(generator=torch.Generator().manual_seed(view.numel()))
    return bucket


def wanted(step: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rounded master copies after a step; the bucket's padding keeps its values."""
    bucket, generator = weights(dtype), torch.Generator().manual_seed(step)
    for view in bucket.views:
        view.add_(torch.randn(view.shape, generator=generator) * UPDATE * (step + 1))
    return bucket.flat


def ranges() -> tuple[list[Range], list[Range]]:
    return weights(torch.bfloat16).ranges


def plan_of(views: list[torch.Tensor], numel: int, dtype: torch.dtype, used: Codec) -> ExchangePlan:
    parameters = [ParameterRecord(shape=tuple(view.shape), start=int(view.storage_offset())) for view in views]
    record = BucketRecord(numel=numel, dtype=dtype, parameter_dtype=dtype, parameters=parameters)
    return gather_plan(record, used.format.name, RANKS)


def of_shard(inside: list[Range], start: int, size: int) -> list[Range]:
    cut = [(max(at, start), min(at + length, start + size)) for at, length in inside]
    return [(first, last - first) for first, last in cut if first < last]


def by_hand(flat: torch.Tensor, target: torch.Tensor, format: str) -> torch.Tensor:
    """Compute all replicas' weights after one gather, part by part of each shard."""
    result, size = flat.clone(), flat.numel() // RANKS
    (coded, dense), used = ranges(), codec(format)
    for start in range(0, flat.numel(), size):
        for at, length in of_shard(coded, start, size):
            difference = target[at : at + length] - flat[at : at + length]
            layout = BlockLayout.of_one(length)
            message = torch.zeros(1, used.message_bytes(layout, flat.dtype), dtype=torch.uint8)
            used.encode(difference, layout, message)
            used.decode(message, layout, difference)
            result[at : at + length] += difference
        for at, length in of_shard(dense, start, size):
            result[at : at + length] += target[at : at + length] - flat[at : at + length]
    return result


def _write(new: torch.Tensor, of_megatron: Any, start: int, end: int) -> None:
    of_megatron.param_data[start:end].copy_(new[start:end])


def _gathered(format: str, dtype: torch.dtype, steps: list[int]) -> list[torch.Tensor]:
    """Return this rank's bucket after each gather."""
    dist.init_process_group("gloo")
    flat, found = weights(dtype).flat, []
    exact = format == "fp32"
    config = OptimusConfig(param_gather_format="int8" if exact else format, compression_seed=1, _exact_blocks=exact)
    technique = ParamGather(config, PARAM_GATHER)
    plan = plan_of(weights(dtype).views, flat.numel(), dtype, codec(format))
    bucket = MegatronBucket.of(flat)
    shards = technique.add_bucket(bucket, plan, Groups(dist.group.WORLD))
    for step in steps:
        assert not shards.updated
        new = wanted(step, dtype)
        written = technique.update([bucket.of_megatron, "another's"], partial(_write, new))
        assert written == [bucket.of_megatron]
        assert shards.updated
        before = flat.clone()
        gather = technique.gather([shards])
        assert torch.equal(flat, before), "parameters change where their gather is waited for, on that stream"
        gather.wait()
        found.append(flat.clone())
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.ci)])
@pytest.mark.parametrize("format", [*formats_of("param_gather_format"), "fp32"])
def test_all_replicas_have_what_decoding_by_hand_gives_to_the_bit(format: str, dtype: torch.dtype) -> None:
    by_rank = run_ranks(RANKS, _gathered, format, dtype, list(range(STEPS)))
    expected = weights(dtype).flat
    for step, replicas in enumerate(zip(*by_rank, strict=True)):
        expected = by_hand(expected, wanted(step, dtype), format)
        for mine in replicas:
            assert torch.equal(mine, expected), f"step {step}"


def test_messages_that_leave_nothing_out_bring_the_owners_weights_within_a_rounding() -> None:
    (found, *_), *_ = run_ranks(RANKS, _gathered, "fp32", torch.bfloat16, [0])
    target = wanted(0, torch.bfloat16)
    # The change of a parameter is rounded to the 8 bits of bf16, and so is its sum with the parameter: one ulp each, of
    # the larger of the two.
    assert ((found - target).abs() <= 2**-7 * (target.abs() + UPDATE * 4)).all()
    assert (found != target).float().mean() < 0.02


@pytest.mark.parametrize("format", formats_of("param_gather_format"))
def test_what_a_message_leaves_out_is_in_the_next_and_nothing_accumulates(format: str) -> None:
    steps = [*range(STEPS), *[STEPS - 1] * 5]
    found, *_ = run_ranks(RANKS, _gathered, format, torch.bfloat16, steps)
    target = wanted(STEPS - 1, torch.bfloat16).float()
    change = float((target - wanted(STEPS - 2, torch.bfloat16).float()).norm())
    left = [float((flat.float() - target).norm()) / change for flat in found[STEPS - 1 :]]
    # A bf16 change that is added to a bf16 parameter is rounded twice, by 2^-8 for weights of size 1.
    rounding = 2**-8 / (UPDATE * STEPS)
    assert left[0] < 1.25 * FORMATS[format].gaussian_error + rounding
    assert left[-1] < max(left[0] / 4, 2e-3), "the same weights again: the messages say what was left out"


def test_a_gather_asks_for_no_memory_after_the_first() -> None:
    assert all(not asked for asked in run_ranks(RANKS, _allocations))


def _allocations() -> list[str]:
    dist.init_process_group("gloo")
    bucket = weights(torch.bfloat16)
    flat, plan = bucket.flat, plan_of(bucket.views, bucket.flat.numel(), torch.bfloat16, codec("int4"))
    shards = Shards(
        MegatronBucket.of(flat), plan, Groups(dist.group.WORLD), codec("int4"), gauge=Gauge(), scratch=Scratch(),
        lane=Ring().lane(), together=True,
    )  # fmt: skip
    asked: list[str] = []
    for step in range(2):
        with torch.no_grad(), Watch() as watch:
            shards.encode(lambda of_megatron, start, end: flat[start:end].add_(0.01))
            shards.start()
            shards.finish()
        asked = watch.allocated + watch.read_by_host if step else []
    return asked


@pytest.mark.parametrize("format", formats_of("param_gather_format"))
def test_bytes_of_a_large_bucket_are_known_before_there_is_one(format: str) -> None:
    numel, ranks, share = 8 * 4096 * 4096, 8, FORMATS[format].bits_per_value / 16
    parameters = [ParameterRecord(shape=(numel // 4096, 4096), start=0)]
    record = BucketRecord(numel=numel, dtype=torch.float32, parameter_dtype=torch.bfloat16, parameters=parameters)
    plan = gather_plan(record, format, ranks)
    assert plan.gather_leg().nbytes / reduce_scatter(2 * numel, Span(ranks)).nbytes == pytest.approx(share, rel=2e-3)
