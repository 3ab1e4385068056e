"""Whether the kernels work on this machine: compiled and run once each, before training depends on them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.triton import launches
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank

__all__ = ["failure"]

_SIZE = 256
"""Rows and columns: large enough for every rank that kernels take."""


def failure(
    ranks: Iterable[int],
    formats: Iterable[str],
    device: torch.device,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    state_dtype: torch.dtype = torch.float32,
) -> str | None:
    """Why a kernel cannot be compiled or run on `device`, at these compression ranks, in these formats; None: all can.

    Triton needs a C compiler and Python's headers on every machine, and a GPU with enough shared memory. What training
    launches afterwards is compiled then: what depends on sizes is no more than whether they are multiples of 16.

    Args:
        dtypes: of messages and gradients.
        state_dtype: of what is remembered.
    """
    try:
        for dtype in dtypes:
            for r in ranks:
                _low_rank(r, dtype, state_dtype, device)
            for format in formats:
                _blocks(format, dtype, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # of Triton's compiler, of the system's, of CUDA's
        first, *_ = [*str(error).strip().splitlines(), ""]
        return f"{type(error).__name__}: {first}"
    return None


def _low_rank(r: int, dtype: torch.dtype, state_dtype: torch.dtype, device: torch.device) -> None:
    compressor, r = TritonLowRank(), min(r, _SIZE)
    matrices = torch.ones(1, _SIZE, _SIZE, dtype=dtype, device=device)
    total, p = matrices.float(), torch.empty(1, _SIZE, r, device=device)
    q = torch.ones_like(p)
    compressor.project(matrices, q.to(state_dtype), out=p)
    for carried in (None, matrices.to(state_dtype)):
        compressor.project_sum(matrices, carried, q.to(state_dtype), total=total, out=p)
    for splits in (2, 4, 8, 16, launches.MAX_SPLITS):
        launches.add_up(p.expand(splits, -1, -1).contiguous(), p)
    # Factors travel in `dtype`, or, of gradients, are widened when they have arrived.
    for wire in {dtype, torch.float32}:
        compressor.orthogonalize(p.to(wire), out=p)
        compressor.back_project(total, p.to(wire), out=q)
        compressor.back_project(matrices, p.to(wire), out=q)
        compressor.subtract_reconstruction(total, p.to(wire), q.to(wire))
        compressor.reconstruct(p.to(wire), q.to(wire), out=matrices.to(wire))


def _blocks(format: str, dtype: torch.dtype, device: torch.device) -> None:
    for signs in (None, torch.ones(BLOCK)):
        codec, values = TritonCodec(format, signs=signs), torch.ones(2 * _SIZE, dtype=dtype, device=device)
        layout = BlockLayout([[(0, _SIZE)]], [[(_SIZE, _SIZE)]])
        messages = torch.empty(1, codec.message_bytes(layout, dtype), dtype=torch.uint8, device=device)
        codec.encode(values, layout, messages)
        codec.decode(messages, layout, values)
        codec.decode_add(messages.expand(2, -1), layout, 0, values)
