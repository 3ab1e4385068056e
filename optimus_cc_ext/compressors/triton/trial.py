"""A trial of the kernels on this machine: compiled, run and compared with torch, before training depends on them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor

from optimus_cc_ext.compressors import exact
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import BLOCK, EXACT, format_named
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.compressors.triton import exact as triton_exact
from optimus_cc_ext.compressors.triton import launches
from optimus_cc_ext.compressors.triton.blocks import WIDEST, TritonCodec
from optimus_cc_ext.compressors.triton.launches import NARROW
from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank

_SIZE = 256
"""Rows and columns: large enough for every rank that kernels take."""


def failure(
    ranks: Iterable[int],
    formats: Iterable[str],
    device: torch.device,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    state_dtype: torch.dtype = torch.float32,
    rotations: Iterable[bool] = (False, True),
    aligns: Iterable[int] = (WIDEST,),
    row_width: int = 0,
) -> str | None:
    """Return why a kernel fails on `device`, at these compression ranks, in these formats; None: all kernels work.

    A kernel fails if it cannot be compiled or run, or if its messages in blocks are not those of torch.

    Triton needs a C compiler and Python's headers on every machine, and a GPU with enough shared memory. After this
    trial, training compiles nothing: a kernel depends on its sizes only by whether they are multiples of 16, and on
    `aligns`.

    Args:
        dtypes: dtypes of messages and gradients.
        state_dtype: dtype of residuals and factors between steps.
        rotations: False for unrotated blocks, True for rotated ones, in formats that have a rotation.
        aligns: powers of two that divide the starts and ends of encoded ranges.
        row_width: values of a row that is a message of its own; 0: there are no such messages.
    """
    try:
        for dtype in dtypes:
            for r in ranks:
                _low_rank(r, dtype, state_dtype, device)
            if EXACT in formats and dtype in NARROW:
                steps = exact.SAMPLED
                while steps <= exact.STEPS:  # each number of steps is a kernel of its own
                    _exact(steps * exact.TOGETHER - _SIZE, dtype, device)
                    steps *= 2
            for format in set(formats) - {EXACT}:
                takes = format_named(format).rotated
                for rotated, align in product({rotated and takes for rotated in rotations}, aligns):
                    _blocks(format, dtype, device, rotated, align)
                for rotated in {rotated and takes for rotated in rotations} if row_width else ():
                    _rows(format, dtype, device, rotated, row_width)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # errors of Triton's compiler, the system, CUDA and this trial
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
    for state in (total.to(state_dtype), q.to(state_dtype)):
        launches.copy_unless(torch.ones((), dtype=torch.bool, device=device), state, state)
    # Factors are sent in `dtype`; the receiver widens those of gradients to fp32.
    for wire in {dtype, torch.float32}:
        compressor.orthogonalize(p.to(wire), out=p)
        compressor.back_project(total, p.to(wire), out=q)
        compressor.back_project(matrices, p.to(wire), out=q)
        compressor.subtract_reconstruction(total, p.to(wire), q.to(wire))
        compressor.reconstruct(p.to(wire), q.to(wire), out=matrices.to(wire))


def _blocks(format: str, dtype: torch.dtype, device: torch.device, rotated: bool, align: int) -> None:
    """Encode and decode values by the kernels and by torch, and compare the results of each step."""
    ours, torchs, values, subject = _compared(format, dtype, device, rotated, 2 * _SIZE)
    layout = BlockLayout([[(align, _SIZE - align)]], [[(_SIZE, _SIZE)]])
    nbytes = ours.message_bytes(layout, dtype)
    messages, expected = torch.zeros(2, 1, nbytes, dtype=torch.uint8, device=device)
    for codec, out in ((ours, messages), (torchs, expected)):
        codec.encode(values, layout, out)
    _compare_messages(ours, messages[0], expected[0], layout, dtype, subject)
    found, wanted = torch.zeros_like(values), torch.zeros_like(values)
    for codec, out in ((ours, found), (torchs, wanted)):
        codec.decode(messages, layout, out)
    _agree(torch.equal(found, wanted), f"{subject}: decoded values differ from torch's")
    for codec, out in ((ours, found), (torchs, wanted)):
        codec.decode_onto(messages, layout, out)
    _agree(torch.equal(found, wanted), f"{subject}: decoded values, added to others, differ from torch's")
    senders = torch.cat([messages, expected])
    # The sums of a rotation differ in fp32's last bits, which can change how they round to 16 bits.
    relative, absolute = (torch.finfo(dtype).eps, 1e-4) if rotated else (0.0, 0.0)
    for onto in (False, True):
        for codec, out in ((ours, found), (torchs, wanted)):
            codec.decode_add(senders, layout, 0, out.zero_(), onto=onto)
        same = torch.allclose(found, wanted, relative, absolute)
        _agree(same, f"{subject}: sums of decoded values differ from torch's")


def _exact(numel: int, dtype: torch.dtype, device: torch.device) -> None:
    """Encode and decode by the kernels and by torch, and compare."""
    old = torch.linspace(-1, 1, numel).to(device, dtype)
    new = (old.float() + torch.linspace(0, 1e-2, numel, device=device)).to(dtype)
    sizes = (exact.first_word(numel) - exact.HEADER, numel // 2 * 4)
    found = []
    for codec in (triton_exact, exact):
        tables, words = (torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes)
        patterns = old.clone().view(torch.int16)
        half, words = dtype is torch.float16, words.view(torch.int32)
        checksum, length = codec.code(patterns, new.view(torch.int16), half, tables, words)
        codec.restore(patterns, half, tables, words)
        found.append((checksum.to(torch.int32), length, tables, words, patterns))
    for ours, torchs in zip(*found, strict=True):
        _agree(torch.equal(ours, torchs), f"exact, {dtype}: messages differ from torch's")
    _agree(torch.equal(found[0][-1], new.view(torch.int16)), f"exact, {dtype}: decoded values differ")


def _rows(format: str, dtype: torch.dtype, device: torch.device, rotated: bool, width: int) -> None:
    """Encode and decode rows by the kernels and by torch, and compare the results."""
    ours, torchs, values, subject = _compared(format, dtype, device, rotated, 2 * width)
    messages, expected = (codec.encode_rows(values.view(2, width)) for codec in (ours, torchs))
    (codes, scales), (codes_too, scales_too) = (
        (each[:, :split].reshape(-1, ours.code_bytes), each[:, split:])
        for split in [width // BLOCK * ours.code_bytes]
        for each in (messages, expected)
    )
    _agree(torch.equal(scales, scales_too), f"{subject}: the scales of rows differ from torch's")
    _compare_codes(ours, codes, codes_too, subject)
    found, wanted = (codec.decode_rows(messages, dtype) for codec in (ours, torchs))
    _agree(torch.equal(found, wanted), f"{subject}: decoded rows differ from torch's")


def _compared(
    format: str, dtype: torch.dtype, device: torch.device, rotated: bool, numel: int
) -> tuple[TritonCodec, Codec, Tensor, str]:
    """Return the codecs of the kernels and of torch, values for both, and format and dtype as an error message
    names them.
    """
    generator = private_generator(0, "trial", format)
    signs = torch.randint(0, 2, (BLOCK,), generator=generator).mul_(2).sub_(1).float() if rotated else None
    # The values are multiples of 1/16 to +-8: 16 bits hold them, and fp32 their sums in any order, so the scales are
    # equal.
    values = torch.randint(-128, 129, (numel,), generator=generator).div(16).to(device, dtype)
    subject = f"{format}{', rotated' if rotated else ''}, {dtype}"
    return TritonCodec(format, signs=signs), Codec(format, signs=signs), values, subject


def _compare_messages(
    codec: Codec, message: Tensor, expected: Tensor, layout: BlockLayout, dtype: torch.dtype, subject: str
) -> None:
    """Compare a message with torch's: equal to the bit, but for codes of rotated values, which may be one apart."""
    (dense, scales, codes), (dense_too, scales_too, codes_too) = (
        codec._split(each, layout, dtype) for each in (message, expected)
    )
    _agree(
        torch.equal(dense, dense_too) and torch.equal(scales, scales_too), f"{subject}: messages differ from torch's"
    )
    _compare_codes(codec, codes, codes_too, subject)


def _compare_codes(codec: Codec, codes: Tensor, codes_too: Tensor, subject: str) -> None:
    apart = (codec.numbers(codes).clone() - codec.numbers(codes_too)).abs().max()
    _agree(bool(apart <= (1 if codec.rotated else 0)), f"{subject}: codes differ from torch's by {float(apart):g}")


def _agree(equal: bool, otherwise: str) -> None:
    if not equal:
        raise ArithmeticError(otherwise)
