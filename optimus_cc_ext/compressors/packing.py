"""Packing of codes into bytes, in torch: one class for each `Format.packing`; `formats` describes the packings."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from optimus_cc_ext.compressors.formats import BLOCK, Format
from optimus_cc_ext.compressors.scratch import Scratch


class Packing(ABC):
    """Packing of codes into bytes: one class for each `Format.packing`."""

    def __init__(self, format: Format, scratch: Scratch) -> None:
        self._format, self._scratch = format, scratch

    @abstractmethod
    def write(self, x: Tensor, codes: Tensor) -> None:
        """Write the codes nearest to X (b, 128), fp32, none above the largest code, to uint8 (b, code_bytes).

        X is overwritten.
        """

    @abstractmethod
    def read(self, codes: Tensor, out: Tensor) -> None:
        """Write the numbers that codes (b, code_bytes) stand for to `out` (b, 128), fp32."""


class _Integers(Packing):
    """Packing of integers in fields of 2, 4, 6 or 8 bits; `formats` says which code is where."""

    def __init__(self, format: Format, scratch: Scratch) -> None:
        super().__init__(format, scratch)
        if format.bits not in (2, 4, 6, 8):
            raise ValueError(f"{format.name}: integers have 2, 4, 6 or 8 bits, not {format.bits}")
        codes_to_a_word = 8 // math.gcd(8, format.bits)
        self._words = BLOCK // codes_to_a_word
        self._fields = [
            (slice(at * self._words, (at + 1) * self._words), at * format.bits) for at in range(codes_to_a_word)
        ]
        """For each field of a word: the codes that are packed into it, and its lowest bit."""

        self._bytes = [
            slice(at * self._words, (at + 1) * self._words) for at in range(format.bits * codes_to_a_word // 8)
        ]
        """Places of the words' bytes in a message: the lowest byte of all words first."""

        self._offsets = sum(format.offset << shift for _, shift in self._fields)

    def write(self, x: Tensor, codes: Tensor) -> None:
        x.round_()
        if self._format.bits == 8:
            codes.view(torch.int8).copy_(x)
            return
        # Words are computed in fp32, which holds their 24 bits exactly.
        words, shape = x[:, self._fields[0][0]], (x.shape[0], self._words)
        out = self._scratch.take("words", shape, torch.float32, x.device)
        for field, shift in self._fields[1:]:
            words = torch.add(words, x[:, field], alpha=float(1 << shift), out=out)
        words.add_(self._offsets)
        if len(self._bytes) == 1:
            codes.copy_(words)
            return
        wide = self._scratch.take("wide words", shape, torch.int32, x.device).copy_(words)
        for place in self._bytes:
            codes[:, place].copy_(wide)  # the lowest byte
            wide.bitwise_right_shift_(8)

    def read(self, codes: Tensor, out: Tensor) -> None:
        if self._format.bits == 8:
            out.copy_(codes.view(torch.int8))
            return
        words = codes if len(self._bytes) == 1 else self._widened(codes)
        part, mask = self._scratch.take("field", words.shape, words.dtype, codes.device), (1 << self._format.bits) - 1
        *lower, (highest, highest_shift) = self._fields
        for field, shift in lower:
            shifted = torch.bitwise_right_shift(words, shift, out=part) if shift else words
            out[:, field].copy_(torch.bitwise_and(shifted, mask, out=part))
        out[:, highest].copy_(torch.bitwise_right_shift(words, highest_shift, out=part))
        out.sub_(self._format.offset)

    def _widened(self, codes: Tensor) -> Tensor:
        """Return words of several bytes, (b, words) in int32."""
        *lower, highest = self._bytes
        words = self._scratch.take("wide words", (codes.shape[0], self._words), torch.int32, codes.device)
        words.copy_(codes[:, highest])
        for place in reversed(lower):
            words.bitwise_left_shift_(8).bitwise_or_(codes[:, place])
        return words


class _Fp32(Packing):
    """Packing of the pass-through format: the values themselves, in fp32."""

    def write(self, x: Tensor, codes: Tensor) -> None:
        codes.view(torch.float32).copy_(x)

    def read(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.float32))


PACKINGS: dict[str, type[Packing]] = {"integers": _Integers, "fp32": _Fp32}
"""Packings by name."""
