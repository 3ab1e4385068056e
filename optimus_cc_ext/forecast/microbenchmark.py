"""Microbenchmarks: time compression on this device with tensors of their own, so that training's tensors stay
untouched.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.messages import BlockCodecs, Formats, MessagePool
from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.metrics.stopwatch import Stopwatch
from optimus_cc_ext.techniques.bucket import Bucket
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.messages import DenseMessages
from optimus_cc_ext.techniques.param_gather import Shards
from optimus_cc_ext.techniques.selective_stage_compression import SelectiveStageCompression

__all__ = ["extrapolated", "time_gradients", "time_message", "time_parameters", "time_rows"]

_SAMPLE_BYTES = 1 << 26
"""Largest size of the gradients that a microbenchmark makes, unless one matrix is larger."""

_TRIES = 2
"""Number of timed tries. Other work may disturb each of them, so the shortest counts."""


@torch.no_grad()
def time_message(messages: DenseMessages, like: torch.Tensor) -> tuple[float, float, float]:
    """Measure the seconds to compress and to decompress a tensor like `like`, and to compute the sender's residual of
    it.

    Args:
        messages: both ends of a link, which nothing else uses.
        like: gives the shape, dtype and device.
    """
    tensor, stopwatch = _noise(like.shape, like), Stopwatch(on=True)
    for _ in range(2):  # the first run allocates memory, and is not timed
        stopwatch.clear()
        with stopwatch.timed("compress", like.device):
            sent = messages.send(tensor)
        with stopwatch.timed("remember", like.device):
            sent.after_post()
        arriving = messages.receive(torch.empty_like(tensor))
        arriving.tensor.copy_(sent.tensor)
        sent.after_wait()
        with stopwatch.timed("decompress", like.device):
            arriving.after_wait()
    return stopwatch.total("compress"), stopwatch.total("decompress"), stopwatch.total("remember")


@torch.no_grad()
def time_gradients(
    matrices: Sequence[torch.Tensor],
    *,
    alone: dist.ProcessGroup,
    compressor: LowRank,
    config: DataParallelCompressionConfig,
    state_dtype: torch.dtype,
    codecs: BlockCodecs | None,
    sharded: bool,
) -> float:
    """Measure the seconds to compress and decompress gradients of the shapes, dtype and device of `matrices`.

    Args:
        matrices: the gradients that training would compress; they are not changed.
        alone: a process group of this rank only.
        codecs: the codecs of a block format; None: low rank.
        sharded: True if a replica needs only its shard of the reduced gradients.
    """
    if not matrices:
        return 0.0
    few, many = _samples([matrix.shape for matrix in matrices], matrices[0].element_size())
    rules = BucketRules(ranks=1, force=True, format="low-rank", rank=config.dp_compression_rank)
    if codecs is not None:
        rules = replace(rules, format=codecs.formats.gradients, sums=codecs.formats.sums, sharded=sharded)

    def tried(shapes: Sequence[torch.Size]) -> tuple[int, float]:
        """Return the bytes of gradients of these shapes, and the seconds that they take."""
        like, sizes = matrices[0], [shape.numel() for shape in shapes]
        # The matrices lie one after the other in one storage, as in a bucket.
        flat, starts = _noise((sum(sizes),), like), [0, *accumulate(sizes)]
        parameters = [
            ParameterRecord(shape=tuple(shape), start=start) for start, shape in zip(starts, shapes, strict=False)
        ]
        record = BucketRecord(numel=flat.numel(), dtype=flat.dtype, parameters=parameters)
        plan = GroupPlan.of([record], rules).buckets[0].compressed
        assert plan is not None, "the rules force compression in a group of one rank"
        technique = SelectiveStageCompression(config, compressor, seed=0, state_dtype=state_dtype, codecs=codecs)
        reducer = technique.bind(plan, flat.device, Groups(alone), None, technique.pool)
        seconds = []
        for _ in range(1 + _TRIES):  # the first run allocates memory, and is not timed
            stopwatch = Stopwatch(on=True)
            with stopwatch.timed("gradients", like.device):
                reducer.reduce(flat)
                technique.states.commit({})
            seconds.append(stopwatch.total("gradients"))
        return flat.nbytes, min(seconds[1:])

    large = tried(many)
    small = tried(few) if few != many else large
    return extrapolated(small, large, sum(matrix.nbytes for matrix in matrices))


@torch.no_grad()
def time_parameters(buckets: Sequence[Shards], *, alone: dist.ProcessGroup, codec: Codec) -> float:
    """Measure the seconds to encode a step's change of the own shards of these buckets, and to decode those of all
    replicas.

    Args:
        buckets: the parameters that training would gather; they are not changed.
        alone: a process group of this rank only.
    """
    if not buckets:
        return 0.0
    like, numel = buckets[0].bucket.parameters, sum(shards.plan.numel for shards in buckets)
    sample = _noise((min(numel, _SAMPLE_BYTES // like.element_size()),), like)
    plan = ExchangePlan(
        numel=sample.numel(), coded=[(0, sample.numel())], dtype=sample.dtype, ranks=1, sharded=True,
        formats=Formats(codec.format.name, codec.format.name),
    )  # fmt: skip
    tried = Shards(Bucket.of(sample), plan, Groups(alone), codec, gauge=Gauge(), scratch=Scratch(), pool=MessagePool())
    seconds = []
    for _ in range(1 + _TRIES):  # the first run allocates memory, and is not timed
        stopwatch = Stopwatch(on=True)
        with stopwatch.timed("encode", like.device):
            tried.keep()
            tried.encode()
        tried.start()
        with stopwatch.timed("decode", like.device):
            tried.finish()
        # In a group of one rank, that rank owns all shards.
        seconds.append(stopwatch.total("encode") / buckets[0].plan.ranks + stopwatch.total("decode"))
    return min(seconds[1:]) * numel / sample.numel()


@torch.no_grad()
def time_rows(codec: Codec, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Measure the seconds to encode `rows` rows of `width` values, and to decode as many.

    Args:
        codec: has the run's format; training waits for this measurement, and so both can share the codec.
    """
    most = max(1, min(rows, _SAMPLE_BYTES // (width * dtype.itemsize)))
    sample = _noise((most, width), torch.empty(0, dtype=dtype, device=device))
    seconds = []
    for _ in range(1 + _TRIES):  # the first run allocates memory, and is not timed
        stopwatch = Stopwatch(on=True)
        with stopwatch.timed("rows", device):
            codec.decode_rows(codec.encode_rows(sample), dtype)
        seconds.append(stopwatch.total("rows"))
    return min(seconds[1:]) * rows / most


def _samples(shapes: Sequence[torch.Size], itemsize: int) -> tuple[list[torch.Size], list[torch.Size]]:
    """Return each shape once, and each shape as often as it occurs: all matrices of one shape take only a few
    launches.
    """
    counts = Counter(shapes)
    once: list[torch.Size] = []
    for shape in counts:
        if not once or sum(each.numel() for each in (*once, shape)) * itemsize <= _SAMPLE_BYTES:
            once.append(shape)
    copies = _SAMPLE_BYTES // (sum(shape.numel() for shape in once) * itemsize)
    return once, once * max(1, min(copies, max(counts.values())))


def extrapolated(few: tuple[int, float], many: tuple[int, float], nbytes: int) -> float:
    """Return the seconds for `nbytes`, on the line through two samples of (bytes, seconds): a fixed part plus seconds
    per byte.

    If there is one sample only, or noise makes the larger sample the faster one, all seconds count as proportional.
    """
    (low, quick), (high, slow) = few, many
    if high == low or slow <= quick:
        return slow * nbytes / high
    return max(slow + (slow - quick) * (nbytes - high) / (high - low), 0.0)


def _noise(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    generator = private_generator(0, "microbenchmark", device=like.device)
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)
