"""How long compression takes on this device, tried on tensors of its own before anything depends on it."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors import LowRank, private_generator
from optimus_cc_ext.config import DataParallelCompressionConfig
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
    gradient = _noise(like.shape, like.dtype, like.device)
    seconds = (0.0, 0.0, 0.0)
    for _ in range(2):  # the first time allocates
        schedule = NonInterleaved(plan.receiving_stage + 2, 1)
        for link in (sending, receiving):
            link.begin(schedule)
        sent, compress = _timed(partial(sending.send, gradient), like.device)
        _, remember = _timed(sent.after_post, like.device)
        sent.after_wait()
        arriving = receiving.receive(torch.empty_like(gradient))
        arriving.tensor.zero_()
        _, decompress = _timed(arriving.after_wait, like.device)
        seconds = (compress, decompress, remember)
    return seconds


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
    like = matrices[0]
    # One after the other in one storage, as in a bucket.
    flat = _noise(torch.Size([sum(shape.numel() for shape in shapes)]), like.dtype, like.device)
    pieces = flat.split([shape.numel() for shape in shapes])
    sample = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    reducer = BucketReducer(
        sample, [], group=alone, compressor=compressor, config=config, seed=0, salt="microbenchmark",
        state_dtype=state_dtype,
    )  # fmt: skip
    seconds = 0.0
    for _ in range(2):  # the first time allocates
        seconds = sum(_timed(work, like.device)[1] for work in (reducer.reduce, partial(reducer.states.commit, {})))
    return seconds * sum(matrix.nbytes for matrix in matrices) / nbytes


def _noise(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = private_generator(0, "microbenchmark", device=device)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def _timed[T](work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What `work` returns, and the seconds that it takes."""
    _finish(device)
    began = time.perf_counter()
    result = work()
    _finish(device)
    return result, time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
