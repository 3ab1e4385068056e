"""Table of the block formats: one record for each format, which all code that depends on a format reads.

It needs no torch, so that the planner and the configuration can read it.

A block is `BLOCK` values that share a scale in bf16. Its codes are packed by `Format.packing`:

- integers: fields of 2, 4, 6 or 8 bits, as many to a word as fill whole bytes: 1 field of 8 bits, 2 of 4, 4 of 6 or 2.
  With G codes to a word and S = BLOCK / G, word j holds the codes j, j + S, j + 2 S, ... from its lowest bits up, and
  its bytes, lowest first, lie S apart. A field of 8 bits is two's complement, a narrower one the code plus `offset`.
- fp32: the values themselves, four bytes each; their scale is 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AT_ONCE = 1 << 11
"""Number of blocks that a CPU encodes at a time. They take 1 MiB in fp32, which stays in the cache between passes."""

BLOCK = 128
"""Number of values that share a scale. Layouts and kernels know this size only; each Format repeats it, for code that
counts bytes.
"""

ROWS = 64
"""Number of blocks that one program of the kernels works on: the rows that Hopper's and Blackwell's tensor cores
multiply at once, and as many as fit the registers.
"""

DENSE_ROWS = 16
"""Number of groups of 128 dense values that one program of the kernels copies."""

RUN_BYTES = 16
"""Bytes in the kernels' tables for the values of one program."""

_ALIGNMENT = 16
"""Bytes that a GPU loads at once. The sections of a message begin at multiples of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Record of one block format."""

    name: str
    """Name of the format in flags, logs and checkpoints."""

    packing: Literal["integers", "fp32"]
    """Packing of codes into bytes; the module's docstring describes each packing."""

    bits: int

    largest: float | None
    """Largest code; None: values are not scaled."""

    rotated: bool
    """True if `--block-rotation` rotates blocks of this format."""

    gaussian_error: float
    """Relative L2 error of Gaussian values, as the format's authors simulated it. Tests and benchmarks allow 10 % more
    or less.
    """

    block: int = BLOCK

    @property
    def code_bytes(self) -> int:
        return self.block * self.bits // 8

    @property
    def bits_per_value(self) -> float:
        """Bits of a value in a message, with its share of the block's 16-bit scale."""
        return self.bits + 16 / self.block

    @property
    def offset(self) -> int:
        """Number that is added to an integer code before packing, because a field narrower than a byte has no sign."""
        return 0 if self.bits == 8 else 1 << (self.bits - 1)


# int4 has codes to +-7, because using all 16 levels is worse (SDP4Bit, Jia et al. 2024, section 3).
_ROWS = (
    Format(name="int8", packing="integers", bits=8, largest=127.0, rotated=True, gaussian_error=0.0065),
    Format(name="int4", packing="integers", bits=4, largest=7.0, rotated=True, gaussian_error=0.117),
    # The pass-through format. No class of traffic accepts it: `--exact-blocks`, a flag of the tests, replaces any
    # chosen block format by it, so that everything but the rounding stays as it is.
    Format(name="fp32", packing="fp32", bits=32, largest=None, rotated=False, gaussian_error=0.0),
)

FORMATS: Mapping[str, Format] = {row.name: row for row in _ROWS}
"""Block formats by name."""

SUM_FORMAT = "int8"
"""Format of sums of gradients on their way back to the replicas: in 4 bits, the sums would have twice the error."""

EXACT = "exact"
"""Choice of a class of traffic that sends differences to the bit (module `exact`)."""

EXACT_BITS = 3.4
"""Bits of a value in exact messages, in the mean of a run whose learning rate is not known."""

EXACT_PEAK_BITS = 5
"""Bits of a value in exact messages at the highest learning rate, if it is not known."""

EXACT_FORECAST = (EXACT_BITS, EXACT_PEAK_BITS)

EXACT_KEPT_BITS = 6
"""Bits of a value in bf16 for which a rank has memory until it sends its message; a longer message is sent raw."""

_WITHOUT_BLOCKS = ("dense", "low-rank", EXACT)
"""Choices of a class of traffic that are not block formats."""


def format_named(name: str) -> Format:
    """Return the block format of this name.

    Raises:
        ValueError: there is no format of this name; the message lists the names.
    """
    if name not in FORMATS:
        raise ValueError(f"{name!r} is no block format: there are {', '.join(FORMATS)}")
    return FORMATS[name]


def block_format(chosen: str) -> str | None:
    """Return the name of the block format that was chosen for a class of traffic; None for all others.

    Raises:
        ValueError: `chosen` is none of these; see `format_named`.
    """
    return None if chosen in _WITHOUT_BLOCKS else format_named(chosen).name


def section_bytes(blocks: int, values: int, code_bytes: int, itemsize: int) -> tuple[int, int, int]:
    """Return the byte offsets of a message's scales and of its codes, and the length of the message.

    Args:
        blocks: number of encoded blocks, each with `code_bytes` of codes.
        values: number of dense values, each of `itemsize` bytes.
    """
    scales = _aligned(values * itemsize)
    codes = scales + _aligned(blocks * 2)
    return scales, codes, codes + _aligned(blocks * code_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
