"""How long compression takes on this device, tried on tensors of its own before anything depends on it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors import LowRank, private_generator
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.metrics.stopwatch import Stopwatch
from optimus_cc_ext.techniques.bucket_reducer import BucketReducer
from optimus_cc_ext.techniques.compressed_backprop import LinkPlan, ReceivingLink, SendingLink
from optimus_cc_ext.techniques.schedule import NonInterleaved

__all__ = ["time_gradients", "time_message"]

_SAMPLE_BYTES = 1 << 26
"""Gradients that a microbenchmark copies at most; what it did not try takes as long as the rest, byte for byte."""


@torch.no_grad()
def time_message(plan: LinkPlan, like: torch.Tensor, compressor: LowRank) -> tuple[float, float, float]:
    """Seconds to compress, to decompress and to remember a gradient of the shape, dtype and device of `like`."""
    sending, receiving = SendingLink(plan, compressor, 0, 0), ReceivingLink(plan, compressor, 0, 0)
    gradient, stopwatch = _noise(like.shape, like), Stopwatch(on=True)
    for _ in range(2):  # the first time allocates
        stopwatch.clear()
        for link in (sending, receiving):
            link.begin(NonInterleaved(plan.receiving_stage + 2, 1))
        with stopwatch.timed("compress", like.device):
            sent = sending.send(gradient)
        with stopwatch.timed("remember", like.device):
            sent.after_post()
        sent.after_wait()
        arriving = receiving.receive(torch.empty_like(gradient))
        arriving.tensor.zero_()
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
) -> float:
    """Seconds to compress and decompress gradients of the shapes, dtype and device of `matrices`.

    Args:
        matrices: what would be compressed, unchanged.
        alone: a group of this rank alone.
    """
    if not matrices:
        return 0.0
    shapes: list[torch.Size] = []
    nbytes = 0
    for matrix in matrices:
        if nbytes + matrix.nbytes <= _SAMPLE_BYTES or not shapes:
            shapes.append(matrix.shape)
            nbytes += matrix.nbytes
    like, sizes = matrices[0], [shape.numel() for shape in shapes]
    # One after the other in one storage, as in a bucket.
    pieces = _noise((sum(sizes),), like).split(sizes)
    sample = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    reducer = BucketReducer(
        sample, [], group=alone, compressor=compressor, config=config, seed=0, salt="microbenchmark",
        state_dtype=state_dtype,
    )  # fmt: skip
    stopwatch = Stopwatch(on=True)
    for _ in range(2):  # the first time allocates
        stopwatch.clear()
        with stopwatch.timed("gradients", like.device):
            reducer.reduce()
            reducer.states.commit({})
    return stopwatch.total("gradients") * sum(matrix.nbytes for matrix in matrices) / nbytes


def _noise(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    generator = private_generator(0, "microbenchmark", device=like.device)
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)
