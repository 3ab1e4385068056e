"""Products by tiles of the result, which stay in registers while all of their terms are added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optimus_cc_ext.compressors.llvm import Int, Place, Writer

__all__ = ["Rows", "TileWriter", "Values"]


@dataclass(frozen=True)
class Values:
    """Values (x, i) at place + x * step + i * stride: x counts a result's rows, i its terms."""

    place: Place
    step: int
    stride: int

    def from_row(self, x: Int | int) -> Values:
        """Those of row x and the ones after it."""
        return Values(self.place + self.place.integer(x) * self.step, self.step, self.stride)


@dataclass(frozen=True)
class Rows:
    """Rows of vectors, `stride` values apart."""

    place: Place
    stride: int


class TileWriter(Writer):
    """Writes functions that multiply."""

    def register(self) -> Place:
        """A place for a vector of zeros, in a register where there is one."""
        place = self.own_vector()
        place.store(self.zeros)
        return place

    def fill(self, place: Place, first: Int | int, end: Int | int) -> None:
        """Zeros from one value to before another, which are a multiple of a vector apart."""
        with self.loop(first, end, self.width) as i:
            (place + i).store(self.zeros)

    def tile(
        self,
        rows: int,
        columns: int,
        values: Values,
        factor: Rows,
        count: Int | int,
        out: Rows,
        *,
        over: bool = False,
        meanwhile: tuple[int, Callable[[Int], None]] | None = None,
    ) -> None:
        """out[x] += sum over i < count of values[x, i] * factor[i], for x < rows, of so many columns.

        Args:
            over: whether the result is written over what `out` was, not added to it.
            meanwhile: for how many of the first i, no more than `count`, to do what else.
        """
        kept = {(x, c): self.register() for x in range(rows) for c in range(0, columns, self.width)}
        times, also = meanwhile or (0, None)
        for first, end, do in ((0, times, also), (times, count, None)):
            with self.loop(first, end) as i:
                row = {c: (factor.place + i * factor.stride + c).load() for c in range(0, columns, self.width)}
                column = [(values.place + i * values.stride + x * values.step).spread() for x in range(rows)]
                for (x, c), result in kept.items():
                    result.store(self.fused(column[x], row[c], result.load()))
                if do is not None:
                    do(i)
        for (x, c), result in kept.items():
            there = out.place + x * out.stride + c
            there.store(result.load() if over else self.builder.fadd(there.load(), result.load()))
