"""Sizes, in bits, of several codings of the difference between two tensors of 16-bit values."""

import heapq

import numpy as np
import torch
from numpy.typing import NDArray

from optimus_cc_ext.compressors import exact

ESCAPE, BLOCK = 23, 128
"""Number of bits of an escaped value, and number of values in a block that has its own shift."""

SHIFTS = range(-3, 5)
"""Shifts of three bits that a block can add to the widths of its exponents."""

CODINGS = ("entropy", "huffman", "rice", "widths", "shifts", "exact")

UNTOUCHED = "untouched"
"""Kind of the rows of an untied word embedding that no token of the iteration has touched."""

Numbers = NDArray[np.int64]


def bits(old: torch.Tensor, new: torch.Tensor) -> dict[str, float]:
    """Return the total number of bits in each coding, and the number of unchanged values.

    entropy: of a difference, given the old exponent; huffman, rice: with a code by exponent; widths: fields as wide as
    the exponent says, with escapes; shifts: the same, with a shift of three bits for each block; exact: the messages of
    `--param-gather-format exact`, whose tables are counted, and those of no other coding.
    """
    before, after = (ordered(each) for each in (old, new))
    exponents = (old.view(torch.int16).numpy().astype(np.int64) >> 7) & 0xFF
    difference = (after - before + (1 << 15)) % (1 << 16) - (1 << 15)
    number = np.where(difference >= 0, 2 * difference, -2 * difference - 1)
    length = np.frexp(number.astype(np.float64))[1].astype(np.int64)
    found, widths = dict.fromkeys(CODINGS, 0.0), np.zeros(256, dtype=np.int64)
    for exponent in np.unique(exponents):
        here = exponents == exponent
        counts = np.bincount(number[here])
        counts = counts[counts > 0]
        found["entropy"] -= float((counts * np.log2(counts / counts.sum())).sum())
        found["huffman"] += huffman([int(count) for count in counts])
        found["rice"] += min(float(((number[here] >> width) + 1 + width).sum()) for width in range(16))
        costs = [float(field_bits(length[here], np.int64(width)).sum()) for width in range(17)]
        widths[exponent] = int(np.argmin(costs))
        found["widths"] += min(costs)
    found["shifts"] = shifted(length, widths[exponents])
    memory = torch.empty(exact.raw_bytes(len(new)) // 4 * 4, dtype=torch.uint8)
    found["exact"] = 8.0 * int(exact.encode(old, new, memory))
    return found | {"unchanged": float((difference == 0).sum())}


def ordered(values: torch.Tensor) -> Numbers:
    """Return bit patterns of 16-bit values as integers in the order of their numbers."""
    patterns = values.view(torch.int16).numpy().astype(np.int64)
    return np.asarray(np.where(patterns >= 0, patterns, -(patterns & 0x7FFF) - 1))


def field_bits(length: Numbers, width: Numbers | np.int64) -> Numbers:
    """Return the bits of numbers of so many bits in fields of the given widths."""
    return np.asarray(width + ESCAPE * (length > width))


def shifted(length: Numbers, width: Numbers) -> float:
    """Return the bits of all numbers if each block chooses the best of `SHIFTS`."""
    padding = -len(length) % BLOCK
    length, width = (np.pad(each, (0, padding)).reshape(-1, BLOCK) for each in (length, width))
    costs = [field_bits(length, np.clip(width + shift, 0, 16)).sum(1) for shift in SHIFTS]
    return float(np.minimum.reduce(costs).sum() + 3 * len(length))


def huffman(counts: list[int]) -> int:
    """Return the bits of a Huffman code for symbols that occur so often."""
    if len(counts) == 1:
        return counts[0]
    heapq.heapify(counts)
    total = 0
    while len(counts) > 1:
        both = heapq.heappop(counts) + heapq.heappop(counts)
        total += both
        heapq.heappush(counts, both)
    return total
