"""Block formats block by block, as they are defined: slow, short, the oracle of `BlockCodec`."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from optimus_cc_ext.compressors.block_codec import LARGEST, BlockFormat
from optimus_cc_ext.compressors.block_layout import BLOCK, BlockLayout

__all__ = ["E4M3", "ReferenceBlockCodec"]

Ranges = tuple[tuple[int, int], ...]

E4M3 = [code * 2.0**-9 for code in range(8)] + [
    (1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)
][:-1]
"""What the codes 0 to 126 stand for: no infinity, and the 127th is NaN (OCP 8-bit floating point, table 1)."""


class ReferenceBlockCodec:
    """Encodes and decodes as `Codec` has it; rotates in fp64.

    Args:
        signs: (128,) of +-1; None: nothing is rotated.
    """

    def __init__(self, format: BlockFormat, *, signs: Tensor | None = None) -> None:
        self.format = format
        self.signs = signs if format != "fp8" else None

    def encode(self, values: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """`values` -> (N, message_bytes)."""
        for index, message in enumerate(out):
            dense, scales, codes = self._sections(message, layout, values.dtype)
            for slot, element in enumerate(_elements(layout.dense[index])):
                dense[slot] = values[element]
            for block, (start, length) in enumerate(_blocks(layout, index)):
                x = torch.zeros(BLOCK)
                x[:length] = values[start : start + length].float()
                scales[block], codes[block] = self.encode_block(x)

    def decode_add(self, messages: Tensor, layout: BlockLayout, index: int, out: Tensor) -> None:
        """The sum of (R, message_bytes), in fp32 and in this order, in `out`."""
        sent = [self._sections(message, layout, out.dtype) for message in messages]
        for slot, element in enumerate(_elements(layout.dense[index])):
            out[element] = sum(dense[slot].float() for dense, _, _ in sent)
        for block, (start, length) in enumerate(_blocks(layout, index)):
            total = torch.zeros(BLOCK)
            for _, scales, codes in sent:
                total += self.decode_block(scales[block], codes[block])
            out[start : start + length] = total[:length].to(out.dtype)

    def encode_block(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(128,) fp32 -> its scale, bf16, and its codes, uint8."""
        y = self._hadamard(x * self.signs).div(BLOCK) if self.signs is not None else x
        scale = (y.abs().max() * (1 / LARGEST[self.format])).bfloat16()
        if scale == 0 or not scale.isfinite():
            numbers = [0.0] * BLOCK
        else:
            numbers = [max(-LARGEST[self.format], min(value, LARGEST[self.format])) for value in (y / scale).tolist()]
        if self.format == "fp8":
            codes = [_to_e4m3(number) for number in numbers]
        elif self.format == "int8":
            codes = [round(number) % 256 for number in numbers]
        else:
            levels = [round(number) + 8 for number in numbers]
            codes = [low + 16 * high for low, high in zip(levels[: BLOCK // 2], levels[BLOCK // 2 :], strict=True)]
        return scale, torch.tensor(codes, dtype=torch.uint8)

    def decode_block(self, scale: Tensor, codes: Tensor) -> Tensor:
        """What they stand for, (128,) fp32."""
        numbers = self.numbers(codes) * scale.double()
        return (numbers if self.signs is None else self._hadamard(numbers) * self.signs).float()

    def numbers(self, codes: Tensor) -> Tensor:
        """Codes of a block, uint8, as numbers, (128,) fp64."""
        if self.format == "fp8":
            numbers = [(-1.0 if code > 127 else 1.0) * E4M3[code % 128] for code in codes.tolist()]
        elif self.format == "int8":
            numbers = [float(code - 256 if code > 127 else code) for code in codes.tolist()]
        else:
            numbers = [code % 16 - 8.0 for code in codes.tolist()] + [code // 16 - 8.0 for code in codes.tolist()]
        return torch.tensor(numbers, dtype=torch.float64)

    def _hadamard(self, x: Tensor) -> Tensor:
        """H x: of two halves first their sum and then their difference, and so on in both."""
        x, width = x.double(), BLOCK
        while width > 1:
            first, second = x.view(-1, 2, width // 2).unbind(1)
            x, width = torch.stack([first + second, first - second], dim=1).flatten(), width // 2
        return x.float() if x.isfinite().all() else x.float().fill_(torch.nan)

    def _sections(self, message: Tensor, layout: BlockLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        code_bytes = BLOCK // 2 if self.format == "int4" else BLOCK
        scales, codes, _ = layout.sections(code_bytes, dtype.itemsize)
        return (
            message[: layout.dense_numel * dtype.itemsize].view(dtype),
            message[scales:][: 2 * layout.blocks].view(torch.bfloat16),
            message[codes:][: layout.blocks * code_bytes].view(layout.blocks, code_bytes),
        )


def _elements(ranges: Ranges) -> Iterator[int]:
    return itertools.chain.from_iterable(range(start, start + length) for start, length in ranges)


def _blocks(layout: BlockLayout, index: int) -> Iterator[tuple[int, int]]:
    """Start and length of every block of a message."""
    for piece in layout.pieces[index]:
        for done in range(0, piece.numel, BLOCK):
            yield piece.start + done, min(BLOCK, piece.numel - done)


def _to_e4m3(number: float) -> int:
    """The code of the nearest value; of two equally near ones the even."""
    nearest = min(range(len(E4M3)), key=lambda code: (abs(E4M3[code] - abs(number)), code % 2))
    return nearest + 128 * (math.copysign(1.0, number) < 0)
