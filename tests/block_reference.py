"""Block formats block by block, as they are defined: slow, short, the oracle of `Codec`.

It takes only name, bits and largest code from the table of formats, and does the packing itself.
"""

import itertools
import math
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from optimus_cc_ext.compressors.blocks import BlockLayout

__all__ = ["ReferenceCodec"]

BLOCK = 128
Ranges = tuple[tuple[int, int], ...]


class ReferenceCodec:
    """Reference codec with `Codec`'s interface; it rotates in fp64.

    Args:
        name: exact, or int and a number of bits.
        bits: bits of a code.
        largest: the largest code; None for exact.
        signs: (128,) of +-1; None: nothing is rotated.
    """

    def __init__(self, name: str, bits: int, largest: float | None, *, signs: Tensor | None = None) -> None:
        if name not in ("fp32", f"int{bits}"):
            raise ValueError(f"no definition of {name} with {bits} bits")
        self.name, self.bits, self.largest, self.signs = name, bits, largest, signs

    def encode(self, values: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """Encode `values` into `out` (N, message_bytes)."""
        for index, message in enumerate(out):
            dense, scales, codes = self._sections(message, layout, values.dtype)
            for slot, element in enumerate(_elements(layout.dense[index])):
                dense[slot] = values[element]
            for block, (start, length) in enumerate(_blocks(layout, index)):
                x = torch.zeros(BLOCK)
                x[:length] = values[start : start + length].float()
                scales[block], codes[block] = self.encode_block(x)

    def decode_add(self, messages: Tensor, layout: BlockLayout, index: int, out: Tensor) -> None:
        """Write the sum of (R, message_bytes), in fp32 and in this order, to `out`."""
        sent = [self._sections(message, layout, out.dtype) for message in messages]
        for slot, element in enumerate(_elements(layout.dense[index])):
            out[element] = sum(dense[slot].float() for dense, _, _ in sent)
        for block, (start, length) in enumerate(_blocks(layout, index)):
            total = torch.zeros(BLOCK)
            for _, scales, codes in sent:
                total += self.decode_block(scales[block], codes[block])
            out[start : start + length] = total[:length].to(out.dtype)

    def encode_rows(self, rows: Tensor) -> Tensor:
        """Encode (n, width): (n, row_bytes) in uint8, [codes of all blocks | scales of all blocks] for each row."""
        return torch.stack([torch.cat([part.view(torch.uint8) for part in self._row(row)]) for row in rows])

    def _row(self, row: Tensor) -> list[Tensor]:
        scales, codes = zip(*(self.encode_block(x) for x in row.float().split(BLOCK)), strict=True)
        return [*codes, torch.stack(scales)]

    def decode_rows(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode (n, row_bytes): (n, width) in `dtype`."""
        return torch.stack([self._values(row) for row in message]).to(dtype)

    def _values(self, row: Tensor) -> Tensor:
        code_bytes = BLOCK * self.bits // 8
        blocks = row.numel() // (code_bytes + 2)
        codes, scales = row[: -2 * blocks].split(code_bytes), row[-2 * blocks :].clone().view(torch.bfloat16)
        return torch.cat([self.decode_block(scale, each) for scale, each in zip(scales, codes, strict=True)])

    def encode_block(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode (128,) fp32; return its scale, bf16, and its codes, uint8."""
        if self.largest is None:
            return torch.tensor(1.0).bfloat16(), torch.frombuffer(
                bytearray(struct.pack("<128f", *x.tolist())), dtype=torch.uint8
            )
        y = self._hadamard(x * self.signs).div(BLOCK) if self.signs is not None else x
        scale = (y.abs().max() * (1 / self.largest)).bfloat16()
        if scale == 0 or not scale.isfinite():
            numbers = [0.0] * BLOCK
        else:
            numbers = [max(-self.largest, min(value, self.largest)) for value in (y / scale).tolist()]
        return scale, torch.tensor(self._pack(list(map(round, numbers))), dtype=torch.uint8)

    def decode_block(self, scale: Tensor, codes: Tensor) -> Tensor:
        """Return the values that scale and codes stand for, (128,) fp32."""
        numbers = self.numbers(codes) * scale.double()
        return (numbers if self.signs is None else self._hadamard(numbers) * self.signs).float()

    def numbers(self, codes: Tensor) -> Tensor:
        """Return the codes of a block, uint8, as numbers, (128,) fp64."""
        if self.name == "fp32":
            numbers = list(struct.unpack("<128f", bytes(codes.tolist())))
        else:
            numbers = [float(number) for number in self._unpack(codes.tolist())]
        return torch.tensor(numbers, dtype=torch.float64)

    # A code of 8 bits is a byte in two's complement. Narrower codes become positive, code + 2^(bits - 1); the codes
    # whose places are equal modulo the number of words are the digits of one binary number. The lowest bytes of all
    # words come first.

    def _pack(self, numbers: list[int]) -> list[int]:
        if self.bits == 8:
            return [number % 256 for number in numbers]
        words = BLOCK * math.gcd(8, self.bits) // 8
        texts = [
            "".join(f"{number + 2 ** (self.bits - 1):0{self.bits}b}" for number in reversed(numbers[word::words]))
            for word in range(words)
        ]
        return [int(text[end - 8 : end], 2) for end in range(len(texts[0]), 0, -8) for text in texts]

    def _unpack(self, codes: list[int]) -> list[int]:
        if self.bits == 8:
            return [code - 256 if code > 127 else code for code in codes]
        words = BLOCK * math.gcd(8, self.bits) // 8
        texts = ["".join(f"{code:08b}" for code in reversed(codes[word::words])) for word in range(words)]
        ends = range(len(texts[0]), 0, -self.bits)
        return [int(text[end - self.bits : end], 2) - 2 ** (self.bits - 1) for end in ends for text in texts]

    def _hadamard(self, x: Tensor) -> Tensor:
        """Return H x: for two halves first their sum and then their difference, and so on in both."""
        x, width = x.double(), BLOCK
        while width > 1:
            first, second = x.view(-1, 2, width // 2).unbind(1)
            x, width = torch.stack([first + second, first - second], dim=1).flatten(), width // 2
        return x.float() if x.isfinite().all() else x.float().fill_(torch.nan)

    def _sections(self, message: Tensor, layout: BlockLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        code_bytes = BLOCK * self.bits // 8
        scales, codes, _ = layout.sections(code_bytes, dtype.itemsize)
        return (
            message[: layout.dense_numel * dtype.itemsize].view(dtype),
            message[scales:][: 2 * layout.blocks].view(torch.bfloat16),
            message[codes:][: layout.blocks * code_bytes].view(layout.blocks, code_bytes),
        )


def _elements(ranges: Ranges) -> Iterator[int]:
    return itertools.chain.from_iterable(range(start, start + length) for start, length in ranges)


def _blocks(layout: BlockLayout, index: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of every block of a message."""
    for piece in layout.pieces[index]:
        for done in range(0, piece.numel, BLOCK):
            yield piece.start + done, min(BLOCK, piece.numel - done)
