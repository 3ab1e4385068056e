"""The two large products of Cholesky QR, by kernels of our own: of each, half is known to be zero, or not needed.

    G = P^T P         its lower triangle
    P <- P W^T        W lower triangular

For a batch of P (n x r) with more columns than `few_columns` is for, on a processor with AVX2 alone: there libraries
multiply at the processor's speed, and half of the work is half of the time. With AVX-512 they are what is used.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from optimus_cc_ext.compressors import llvm
from optimus_cc_ext.compressors.llvm import Compiled, Int
from optimus_cc_ext.compressors.tiles import Rows, TileWriter, Values

__all__ = ["gram", "takes", "turn"]

_WIDTH, _VECTORS = 8, 2
"""fp32 values in a vector, and vectors in a row of a tile: with 6 rows they and what they need fill 16 registers."""

_ROWS, _COLUMNS = 6, _WIDTH * _VECTORS

_TERMS_AT_ONCE = 128
"""Rows of P whose products are summed by themselves: copied to where they do not all fall into one set of the cache."""

_MOST_COLUMNS = 256
"""The kernels are as long as there are tiles in a row."""

Take = Callable[..., Tensor]
"""Scratch memory: (name, shape, dtype)."""


def takes(p: Tensor) -> bool:
    """Whether there are kernels here for P (B, n, r), fp32 and contiguous, and half of the threads have a matrix each.

    The others then wait, but half of the work is not done.
    """
    batch, _, r = p.shape
    return (
        r % _COLUMNS == 0
        and r <= _MOST_COLUMNS
        and 2 * batch >= torch.get_num_threads()
        and p.dtype == torch.float32
        and p.is_cpu
        and p.is_contiguous()
        and llvm.is_there()
        and not llvm.vector_registers(2 * _WIDTH)
    )


def gram(p: Tensor, out: Tensor, take: Take) -> None:
    """Write the lower triangle of P^T P into out (B, r, r), and zeros or anything above it; what it `takes`."""
    batch, n, r = p.shape
    threads = torch.get_num_threads()
    rows = take("rows32", (threads, _TERMS_AT_ONCE, _line(r)), torch.float32)
    _lower_gram(r)(threads, p=p.data_ptr(), n=n, batch=batch, out=out.data_ptr(), rows=rows.data_ptr())


def turn(p: Tensor, weights: Tensor, out: Tensor, take: Take) -> None:
    """out = P W^T, W (B, r, r) contiguous, zero above its diagonal; `out` contiguous, may be p; what it `takes`."""
    batch, n, r = p.shape
    threads = torch.get_num_threads()
    packed = take("packed32", (threads, r, r), torch.float32)
    _turned(r)(
        threads, p=p.data_ptr(), n=n, batch=batch, weights=weights.data_ptr(), out=out.data_ptr(),
        packed=packed.data_ptr(),
    )  # fmt: skip


def _line(r: int) -> int:
    """Values from one copied row to the next: an odd number of cache lines."""
    return (r // 16 | 1) * 16


@cache
def _lower_gram(r: int) -> Compiled:
    w = TileWriter("lower_gram", ("p", "n", "batch", "out", "rows"), _WIDTH)
    n, rows = w.argument("n"), w.place("rows") + w.thread * (_TERMS_AT_ONCE * _line(r))
    matrix, end = w.share(w.argument("batch"))
    with w.loop(matrix, end) as index:
        p, out = w.place("p") + index * n * r, w.place("out") + index * (r * r)
        w.fill(out, 0, r * r)
        with w.loop(0, n, _TERMS_AT_ONCE) as first:
            here = (n - first).at_most(_TERMS_AT_ONCE)
            with w.loop(0, here) as i, w.loop(0, r, _WIDTH) as j:
                (rows + i * _line(r) + j).store((p + (first + i) * r + j).load())

            def tile(x: Int, c: int, high: int, here: Int = here, out: llvm.Place = out) -> None:
                values, factor = Values(rows + x, 1, _line(r)), Rows(rows + c, _line(r))
                w.tile(high, _COLUMNS, values, factor, here, Rows(out + x * r + c, r))

            for c in range(0, r, _COLUMNS):
                above = c // _ROWS * _ROWS
                whole = above + (r - above) // _ROWS * _ROWS
                with w.loop(above, whole, _ROWS) as x:
                    tile(x, c, _ROWS)
                if whole < r:
                    tile(w.integer(whole), c, r - whole)
    return w.compile()


@cache
def _turned(r: int) -> Compiled:
    w = TileWriter("turned_by_a_triangle", ("p", "n", "batch", "weights", "out", "packed"), _WIDTH)
    n, packed = w.argument("n"), w.place("packed") + w.thread * (r * r)
    matrix, end = w.share(w.argument("batch"))
    with w.loop(matrix, end) as index:
        p, out = w.place("p") + index * n * r, w.place("out") + index * n * r
        weights = w.place("weights") + index * (r * r)
        # W^T by blocks of a tile's columns, each in the order of its use, down to where it is zero.
        with w.loop(0, r, _COLUMNS) as c, w.loop(0, c + _COLUMNS) as k:
            for x in range(_COLUMNS):
                (packed + c * r + k * _COLUMNS + x).put((weights + (c + x) * r + k).get())
        whole = n // _ROWS * _ROWS
        for begin, stop, rows in ((w.integer(0), whole, _ROWS), (whole, n, 1)):
            with w.loop(begin, stop, rows) as i:
                # From the last columns on: the others do not read those, which may be written where P is.
                for column in reversed(range(0, r, _COLUMNS)):
                    values, factor = Values(p + i * r, r, 1), Rows(packed + column * r, _COLUMNS)
                    target = Rows(out + i * r + column, r)
                    w.tile(rows, _COLUMNS, values, factor, column + _COLUMNS, target, over=True)
    return w.compile()
