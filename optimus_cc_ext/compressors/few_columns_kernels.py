"""The kernels of `few_columns`, one for each shape: written here, compiled when they are first called for.

Values of the matrix are spread over a vector, and the factor's rows are vectors: so neither has to be turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from optimus_cc_ext.compressors import llvm
from optimus_cc_ext.compressors.llvm import Compiled, Int, Place
from optimus_cc_ext.compressors.tiles import Rows, TileWriter, Values

__all__ = ["both_turned", "line", "subtracted", "sum_and_products", "turned", "vector_width"]

_MOST_COLUMNS = 48
"""Of a factor. With more a library's products are as fast, and the registers hold no tile."""

_ROWS_AT_ONCE = 24
"""Of T, at most, unless a tile has more: two blocks share a core's cache with the factors and what streams by."""

_TERMS_AT_ONCE = 512
"""Of a sum. Longer ones are sums of sums: their rounding grows less, and as many rows of Q stay near."""

_LENGTHS = 1e-30, 1e30
"""Squared lengths of columns between which fp32 loses nothing of a Gram matrix to its range."""


def vector_width(r: int) -> int:
    """fp32 values in the vectors for factors of r columns; 0: there are no kernels for them here."""
    if r % 8 or not 0 < r <= _MOST_COLUMNS or not llvm.is_there():
        return 0
    return 16 if r % 16 == 0 and llvm.vector_registers(16) else 8


def line(m: int) -> int:
    """Values from one row of a block of m columns to the next: an odd number of cache lines, so that the values of a
    column do not all fall into one set of the cache."""
    return (m // 16 | 1) * 16


@cache
def sum_and_products(m: int, r: int, with_residual: bool) -> tuple[Compiled, int]:
    """T = M + E, P = T Q, and of each thread its part of S = T^T P; and into how many rows P's blocks are padded.

    Arguments: matrices M and its `stride` from row to row, residual E, total T (n, m), q, n; product P, padded;
    parts (count, m, r); blocks (count, 2, rows, `line`).
    """
    names = ("matrices", "stride", "residual", "total", "q", "n", "product", "parts", "count", "blocks")
    w = _FactorWriter("sum_and_products", names, r)
    rows = max(_ROWS_AT_ONCE // w.rows, 1) * w.rows
    n, part = w.argument("n"), w.place("parts") + w.thread * (m * r)
    buffers = w.place("blocks") + w.thread * (2 * rows * line(m))
    w.fill(part, 0, m * r)
    with w.when(w.is_less(w.thread, 1)):  # a team may be smaller than what was asked for
        w.fill(w.place("parts"), w.threads * (m * r), w.argument("count") * (m * r))

    def add(row: Int, into: Place, first: Int | int, vectors: int) -> None:
        """So many vectors of a row of T, from its value `first` on, and to a row of a block, too."""
        for there in (w.integer(v * w.width) + first for v in range(vectors)):
            values = (w.place("matrices") + row * w.argument("stride") + there).load()
            if with_residual:
                values = w.builder.fadd(values, (w.place("residual") + row * m + there).load())
            (w.place("total") + row * m + there).store(values)
            (into + there).store(values)

    # While one block of rows is multiplied by Q, the next one is added up, a piece of a row with each tile: memory is
    # read while registers multiply.
    pieces = next(k for k in range(-(-m // (w.rows * _TERMS_AT_ONCE)), m + 1) if m // w.width % k == 0)
    strips, vectors = w.rows * pieces, m // w.width // pieces
    together = -(-w.rows // w.width)
    times, left = divmod(vectors, together)
    first_block, end = w.share((n + rows - 1) // rows)
    begun = ((end - first_block) * rows).at_most(n - first_block * rows).at_most(rows)  # a thread may have no block
    with w.loop(0, begun) as i, w.loop(0, m, w.width) as j:
        add(first_block * rows + i, buffers + i * line(m), j, 1)
    with w.loop(first_block, end) as index:
        first, odd = index * rows, (index - first_block) % 2
        block, other = (buffers + which * (rows * line(m)) for which in (odd, w.integer(1) - odd))
        here = (n - first).at_most(rows)
        coming = ((end - index - 1) * rows).at_most(n - first - here).at_most(rows)
        # The rows that a last block lacks hold what was there before: they come out, and are never read.
        product = w.place("product") + first * r
        w.fill(product, 0, rows * r)
        with w.loop(0, strips) as strip, w.loop(0, rows // w.rows) as group:
            column = strip * m // strips
            columns = (strip + 1) * m // strips - column
            piece = strip * (rows // w.rows) + group
            row, begin = piece // pieces, piece % pieces * (vectors * w.width)
            source = Values(block + group * (w.rows * line(m)) + column, line(m), 1)
            target = product + group * (w.rows * r)
            factor = w.place("q") + column * r
            with w.either(w.is_less(row, coming)) as (then, otherwise):
                with then:
                    there, into = first + rows + row, other + row * line(m)

                    def add_some(k: Int, there: Int = there, into: Place = into, begin: Int = begin) -> None:
                        add(there, into, begin + k * (together * w.width), together)

                    w.add_tile(w.rows, source, factor, columns, target, meanwhile=(times, add_some))
                    add(there, into, begin + times * together * w.width, left)
                with otherwise:
                    w.add_tile(w.rows, source, factor, columns, target)
        w.add_tiles(m, Values(block, 1, line(m)), product, here, part)
    return w.compile(), rows


@cache
def both_turned(m: int, r: int) -> Compiled:
    """P <- P W^T and Q' = S W^T, with S the sum of its parts; and how much W amplifies.

    Arguments: product (n, r), n, p, parts (count, m, r), count, new_q, amplification (fp64).
    """
    w = _FactorWriter("both_turned", ("product", "n", "p", "parts", "count", "new_q", "amplification"), r)
    product, parts, weights = w.place("product"), w.place("parts"), w.own(r * r)
    # By each thread for itself: to wait for one that shares it would take longer.
    amplification = w.weights(product, w.argument("n"), weights)
    with w.when(w.is_less(w.thread, 1)):
        w.place("amplification", double=True).put(amplification)
    first, end = w.share(w.argument("n"))
    w.turn(product + first * r, end - first, weights, w.place("p") + first * r)
    first, end = w.share(m)
    with w.loop(1, w.argument("count")) as part, w.loop(first * r, end * r, w.width) as i:
        (parts + i).store(w.builder.fadd((parts + i).load(), (parts + part * (m * r) + i).load()))
    w.turn(parts + first * r, end - first, weights, w.place("new_q") + first * r)
    return w.compile()


@cache
def turned(r: int, worth: float) -> Compiled:
    """For a batch, each matrix by one thread: out = P W^T where W amplifies no more than `worth`, P elsewhere.

    Arguments: p (batch, n, r), n, batch, out, amplification (batch, fp64).
    """
    w = _FactorWriter("turned", ("p", "n", "batch", "out", "amplification"), r)
    n, weights = w.argument("n"), w.own(r * r)
    first, end = w.share(w.argument("batch"))
    with w.loop(first, end) as index:
        p, out = w.place("p") + index * n * r, w.place("out") + index * n * r
        amplification = w.weights(p, n, weights)
        (w.place("amplification", double=True) + index).put(amplification)
        with w.either(w.builder.fcmp_ordered("<=", amplification, w.real(worth))) as (then, otherwise):
            with then:
                w.turn(p, n, weights, out)
            with otherwise, w.loop(0, n * r, w.width) as i:
                (out + i).store((p + i).load())
    return w.compile()


@cache
def subtracted(m: int, r: int) -> Compiled:
    """T <- T - P Q^T; each product's terms are added in order, rounded once each, before it is subtracted.

    Arguments: total T (n, m), n, p, q, packed (threads, m, r).
    """
    w = _FactorWriter("subtracted", ("total", "n", "p", "q", "packed"), r)
    wide, tall = 2, (llvm.vector_registers(w.width) - 4) // 2
    columns = wide * w.width
    packed = w.place("packed") + w.thread * (m * r)
    # Q in the order of its use: for every two vectors of a row of T, those of all of Q's columns.
    with w.loop(0, m, columns) as j, w.loop(0, columns) as k:
        for c in range(r):
            (packed + j * r + k + c * columns).put((w.place("q") + (j + k) * r + c).get())

    def tile(i: Int, j: Int, rows: int) -> None:
        kept = {(x, y): w.register() for x in range(rows) for y in range(wide)}
        with w.loop(0, r) as c:
            column = [(w.place("p") + (i + x) * r + c).spread() for x in range(rows)]
            row = [(packed + j * r + c * columns + y * w.width).load() for y in range(wide)]
            for (x, y), product in kept.items():
                product.store(w.fused(column[x], row[y], product.load()))
        for (x, y), product in kept.items():
            there = w.place("total") + (i + x) * m + j + y * w.width
            there.store(w.builder.fsub(there.load(), product.load()))

    first, end = w.share(w.argument("n"))
    whole = first + (end - first) // tall * tall
    for begin, stop, rows in ((first, whole, tall), (whole, end, 1)):
        with w.loop(begin, stop, rows) as i, w.loop(0, m, columns) as j:
            tile(i, j, rows)
    return w.compile()


class _FactorWriter(TileWriter):
    """Writes functions on factors of r columns."""

    def __init__(self, name: str, arguments: tuple[str, ...], r: int) -> None:
        super().__init__(name, arguments, vector_width(r))
        self.r = r
        self.rows = (llvm.vector_registers(self.width) - 4) // (r // self.width)
        """Rows of r values that stay in registers, with what it takes to add to them."""

    def add_tiles(self, rows: int, values: Values, factor: Place, count: Int, out: Place) -> None:
        """out[x] += sum over i < count of values[x, i] * factor[i], for x < rows, by tiles."""
        whole = rows // self.rows * self.rows
        with self.loop(0, whole, self.rows) as x:
            self.add_tile(self.rows, values.from_row(x), factor, count, out + x * self.r)
        if whole < rows:
            self.add_tile(rows - whole, values.from_row(whole), factor, count, out + whole * self.r)

    def add_tile(
        self,
        rows: int,
        values: Values,
        factor: Place,
        count: Int | int,
        out: Place,
        *,
        over: bool = False,
        meanwhile: tuple[int, Callable[[Int], None]] | None = None,
    ) -> None:
        """`TileWriter.tile` of all columns."""
        self.tile(rows, self.r, values, Rows(factor, self.r), count, Rows(out, self.r), over=over, meanwhile=meanwhile)

    def turn(self, p: Place, n: Int, weights: Place, out: Place) -> None:
        """out = P weights, (n, r) and (r, r); p may be out."""
        whole = n // self.rows * self.rows
        for first, end, rows in ((self.integer(0), whole, self.rows), (whole, n, 1)):
            with self.loop(first, end, rows) as i:
                self.add_tile(rows, Values(p + i * self.r, self.r, 1), weights, self.r, out + i * self.r, over=True)

    def weights(self, p: Place, n: Int, weights: Place) -> Any:
        """Write W^T, (r, r), for the P (n, r); returns how much W amplifies the Gram matrix's error, fp64, or NaN."""
        b, r, gram = self.builder, self.r, self.own(self.r * self.r)
        lower, inverse = (self.own(r * r, double=True) for _ in range(2))
        scale = self.own(r, double=True)
        zero, one = self.real(0.0), self.real(1.0)
        self.fill(gram, 0, r * r)
        self.fill(weights, 0, r * r)
        with self.loop(0, n, _TERMS_AT_ONCE) as i:
            self.add_tiles(r, Values(p + i * r, 1, r), p + i * r, (n - i).at_most(_TERMS_AT_ONCE), gram)
        verdict, largest, everything = (self.own(1, double=True) for _ in range(3))
        for sum_of_none in (verdict, largest, everything):
            sum_of_none.put(zero)
        with self.loop(0, r) as i:
            length = b.fpext((gram + i * r + i).get(), self.double)
            above, below = (
                b.fcmp_ordered(*than)
                for than in ((">", length, self.real(_LENGTHS[0])), ("<", length, self.real(_LENGTHS[1])))
            )
            verdict.put(b.fadd(verdict.get(), b.select(b.and_(above, below), zero, self.real(math.nan))))
            (scale + i).put(b.fdiv(one, self.root(length)))

        def scaled(i: Int, j: Int) -> Any:
            value = b.fpext((gram + i * r + j).get(), self.double)
            return b.fmul(value, b.fmul((scale + i).get(), (scale + j).get()))

        # L, row by row. A pivot that is not positive makes a root of NaN, or a quotient of Inf: both reach the verdict.
        with self.loop(0, r) as i:
            with self.loop(0, i) as j:
                rest = self.dot(0, j, lambda k: (lower + i * r + k, lower + j * r + k))
                (lower + i * r + j).put(b.fdiv(b.fsub(scaled(i, j), rest), (lower + j * r + j).get()))
            rest = self.dot(0, i, lambda k: (lower + i * r + k, lower + i * r + k))
            (lower + i * r + i).put(self.root(b.fsub(scaled(i, i), rest)))
        # L^-1, and W = L^-1 D.
        with self.loop(0, r) as i:
            squares = self.own(1, double=True)
            squares.put(zero)
            with self.loop(0, i + 1) as j:
                rest = self.dot(j, i, lambda k: (lower + i * r + k, inverse + k * r + j))
                of_identity = b.select(b.icmp_unsigned("==", i.value, j.value), one, zero)
                value = b.fdiv(b.fsub(of_identity, rest), (lower + i * r + i).get())
                (inverse + i * r + j).put(value)
                (weights + j * r + i).put(b.fptrunc(b.fmul(value, (scale + j).get()), self.single))
                squares.put(b.fadd(squares.get(), b.fmul(value, value)))
            of_row = squares.get()
            largest.put(b.select(b.fcmp_ordered(">", of_row, largest.get()), of_row, largest.get()))
            everything.put(b.fadd(everything.get(), of_row))
        # Inf - Inf and NaN - NaN are NaN, which the comparison passed over.
        broken = b.fsub(everything.get(), everything.get())
        return b.fadd(b.fadd(largest.get(), verdict.get()), broken)

    def dot(self, first: Int | int, end: Int | int, pair: Callable[[Int], tuple[Place, Place]]) -> Any:
        """The sum of products of pairs of fp64 values."""
        total = self.own(1, double=True)
        total.put(self.real(0.0))
        with self.loop(first, end) as k:
            left, right = pair(k)
            total.put(self.builder.fadd(total.get(), self.builder.fmul(left.get(), right.get())))
        return total.get()
