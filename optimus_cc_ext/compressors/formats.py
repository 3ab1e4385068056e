"""The table of block formats: one record each, read by all who need to know one.

Needs no torch, so that the planner and the configuration can read it.

A block is `BLOCK` values that share a scale, bf16. Its codes are packed by `Format.packing`:

- integers: fields of 2, 4, 6 or 8 bits, as many to a word as fill whole bytes: 1 of 8 bits, 2 of 4, 4 of 6 or 2. With G
  codes to a word and S = BLOCK / G, word j holds the codes j, j + S, j + 2 S, ... from its lowest bits up, and its
  bytes, lowest first, lie S apart. A field of 8 bits is two's complement; a narrower one is the code plus `offset`.
- e4m3: a byte a code, OCP's 8-bit floating point without infinity.
- fp32: the values themselves, four bytes each; their scale is 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["BLOCK", "FORMATS", "SUM_FORMAT", "Format", "block_format", "format_named"]

BLOCK = 128
"""Values that share a scale. Layouts and kernels know this size only; a record repeats it for those who count bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A block format, as data."""

    name: str
    """The name in flags, logs and checkpoints."""

    packing: Literal["integers", "e4m3", "fp32"]
    """The way that codes become bytes; see above."""

    bits: int
    """Bits of a code."""

    largest: float | None
    """The largest code; None: values are not scaled."""

    rotated: bool
    """True if `--block-rotation` rotates blocks of this format."""

    gaussian_error: float
    """Relative L2 error of Gaussian values, as others simulated it; tests and benchmarks allow 10 % more or less."""

    block: int = BLOCK
    """Values that share a scale."""

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block * self.bits // 8

    @property
    def bits_per_value(self) -> float:
        """Bits of a value in a message, its share of the block's 16-bit scale included."""
        return self.bits + 16 / self.block

    @property
    def offset(self) -> int:
        """The number that is added to an integer code before it is packed: a field narrower than a byte has no sign."""
        return 0 if self.bits == 8 else 1 << (self.bits - 1)


# int4 has codes to +-7: all 16 levels are worse (SDP4Bit, Jia et al. 2024, section 3). E4M3 has its own exponent for
# each value, so that an outlier does not spoil its block; no rotation spreads it.
_ROWS = (
    Format(name="int8", packing="integers", bits=8, largest=127.0, rotated=True, gaussian_error=0.0065),
    Format(name="int4", packing="integers", bits=4, largest=7.0, rotated=True, gaussian_error=0.117),
    Format(name="fp8", packing="e4m3", bits=8, largest=448.0, rotated=False, gaussian_error=0.026),
    # The pass-through format, which leaves nothing out. No class of traffic accepts it: `--exact-blocks`, a flag of the
    # tests, puts it in the place of whichever format was chosen, so that everything but the rounding stays as it is.
    Format(name="exact", packing="fp32", bits=32, largest=None, rotated=False, gaussian_error=0.0),
)

FORMATS: Mapping[str, Format] = {row.name: row for row in _ROWS}
"""All formats by name."""

SUM_FORMAT = "int8"
"""The format of sums of gradients on their way back to the replicas: in 4 bits they would have twice the error."""

_WITHOUT_BLOCKS = ("dense", "low-rank")
"""The choices of a class of traffic that are no format of blocks."""


def format_named(name: str) -> Format:
    """Look up a format.

    Raises:
        ValueError: there is none of this name; the message lists the names that there are.
    """
    if name not in FORMATS:
        raise ValueError(f"{name!r} is no block format: there are {', '.join(FORMATS)}")
    return FORMATS[name]


def block_format(chosen: str) -> str | None:
    """Return the name of a format if that is what was chosen for a class of traffic, None for dense and low-rank.

    Raises:
        ValueError: the choice is none of these; see `format_named`.
    """
    return None if chosen in _WITHOUT_BLOCKS else format_named(chosen).name
