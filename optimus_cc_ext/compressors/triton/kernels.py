"""Triton kernels of the low-rank step; `launches` calls them. Needs triton to be imported.

Conventions of all kernels: a (B, rows, columns) tensor is passed as a tuple of its pointer and its strides in elements,
which may have any values, or as None. `sizes` is (n, m, r) or (n, r). Tiles are powers of two and masked, so sizes may
have any values as well. Offsets are 64-bit, because a batch of matrices has more than 2^31 elements. Every element of a
result is summed by one program in one order, without atomics, so equal inputs give equal bits. Sums that are split
among programs are written as partial sums, which `add_up` adds in a fixed order. Triton's compiler evaluates `if x is
not None` at compile time. The number of `splits` is no constant of the compiler, because it depends on sizes: kernels
for it would be compiled in the first iteration, and not when a run starts.
"""

import triton
import triton.language as tl

SIXTEEN_EPS = tl.constexpr(2.0**-48)
"""16 times the eps of float64."""


@triton.jit
def _at(tensor, batch, rows, columns):
    """Point to the elements `rows` x `columns` of matrix `batch`."""
    matrix = tensor[0] + batch.to(tl.int64) * tensor[1]
    return matrix + rows.to(tl.int64)[:, None] * tensor[2] + columns.to(tl.int64)[None, :] * tensor[3]


@triton.jit
def _inside(rows, columns, height, width):
    return (rows < height)[:, None] & (columns < width)[None, :]


@triton.jit
def _tile(tensor, batch, rows, columns, height, width):
    """Load the elements `rows` x `columns` of matrix `batch`, with 0 outside of the matrix."""
    return tl.load(_at(tensor, batch, rows, columns), mask=_inside(rows, columns, height, width), other=0.0)


@triton.jit(do_not_specialize=["splits"])
def sum_and_project(
    matrices, residual, q, total, partial, sizes, splits,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute total = matrices + residual; partial (B * splits, n, r) = the share of each split's columns in total Q.

    If `residual` is None the sum is `matrices` itself; if `total` is None the sum is not written. Grid: (row blocks,
    splits, B).
    """
    block, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, m, r = sizes[0], sizes[1], sizes[2]
    rows, ranks = block * ROWS + tl.arange(0, ROWS), tl.arange(0, RANKS)
    p = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(split * COLUMNS, m, splits * COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        tile = _tile(matrices, batch, rows, columns, n, m).to(tl.float32)
        if residual is not None:
            tile += _tile(residual, batch, rows, columns, n, m).to(tl.float32)
        if total is not None:
            _store(total, batch, rows, columns, n, m, tile)
        factor = _tile(q, batch, columns, ranks, m, r).to(tl.float32)
        p = tl.dot(tile, factor, p, input_precision=PRECISION)
    _store(partial, batch * splits + split, rows, ranks, n, r, p)


@triton.jit(do_not_specialize=["splits"])
def add_up(partial, out, sizes, splits, ADDENDS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out (B, n, r) = the sum of partial (B * splits, n, r) over the splits. Grid: (blocks of n * r, B).

    ADDENDS is `splits` rounded up to a power of two. All addends are loaded at once, because the cost of this kernel is
    latency.
    """
    n, r = sizes[0], sizes[1]
    elements, addend, batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ADDENDS), tl.program_id(1)
    rows, ranks = elements // r, elements % r
    offsets = rows.to(tl.int64) * partial[2] + ranks * partial[3]
    addends = partial[0] + (batch * splits + addend).to(tl.int64)[:, None] * partial[1] + offsets[None, :]
    summed = tl.sum(tl.load(addends, mask=_inside(addend, elements, splits, n * r), other=0.0), axis=0)
    to = out[0] + batch.to(tl.int64) * out[1] + rows.to(tl.int64) * out[2] + ranks * out[3]
    tl.store(to, summed.to(out[0].dtype.element_ty), mask=elements < n * r)


@triton.jit
def multiply_out(
    p, q, out, total, sizes, share,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, STEP: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out = P Q^T, rounded to its dtype, or, with `total`, total -= share * P Q^T rounded to P's dtype.

    Both use one kernel with one tiling, because a residual is right only if both give the same bits. STEP is the number
    of the RANKS columns that are multiplied at a time. WIDEN: multiply in fp32 instead of in P's and Q's 16-bit dtype,
    whose products are exact in fp32. Grid: (row blocks, column blocks, B).
    """
    row_block, column_block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, m, r = sizes[0], sizes[1], sizes[2]
    rows, columns = row_block * ROWS + tl.arange(0, ROWS), column_block * COLUMNS + tl.arange(0, COLUMNS)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, RANKS, STEP):
        ranks = start + tl.arange(0, STEP)
        left = _tile(p, batch, rows, ranks, n, r)
        right = _tile(q, batch, columns, ranks, m, r)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        product = tl.dot(left, tl.trans(right), product, input_precision=PRECISION)
    if out is not None:
        _store(out, batch, rows, columns, n, m, product)
    else:
        arrives = product.to(p[0].dtype.element_ty).to(tl.float32)
        before = _tile(total, batch, rows, columns, n, m)
        _store(total, batch, rows, columns, n, m, before - share * arrives)


@triton.jit
def _store(tensor, batch, rows, columns, height, width, values):
    mask = _inside(rows, columns, height, width)
    tl.store(_at(tensor, batch, rows, columns), values.to(tensor[0].dtype.element_ty), mask=mask)


@triton.jit
def _times_transposed(rows_of_p, inverse, batch, r, RANKS: tl.constexpr):
    """Return a block of rows of P times the transpose of an inverse Cholesky factor, in float64. A NaN or Inf fills its
    row with NaN (0 * NaN is NaN)."""
    ranks = tl.arange(0, RANKS)
    factor = _tile(inverse, batch, ranks, ranks, r, r)
    return tl.dot(rows_of_p, tl.trans(factor), input_precision="ieee", out_dtype=tl.float64)


@triton.jit(do_not_specialize=["splits"])
def partial_grams(p, inverse, grams, sizes, splits, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Compute grams (B * splits, r, r) = A^T A over the rows of each split, in fp64; A = P, or P L^-T with L^-1 given.

    Grid: (splits, B).
    """
    split, batch = tl.program_id(0), tl.program_id(1)
    n, r = sizes[0], sizes[1]
    ranks = tl.arange(0, RANKS)
    gram = tl.zeros((RANKS, RANKS), tl.float64)
    for start in range(split * ROWS, n, splits * ROWS):
        a = _tile(p, batch, start + tl.arange(0, ROWS), ranks, n, r).to(tl.float64)
        if inverse is not None:
            a = _times_transposed(a, inverse, batch, r, RANKS)
        gram = tl.dot(tl.trans(a), a, gram, input_precision="ieee", out_dtype=tl.float64)
    _store(grams, batch * splits + split, ranks, ranks, r, r, gram)


@triton.jit(do_not_specialize=["splits"])
def inverse_factor(grams, inverses, sizes, splits, ADDENDS: tl.constexpr, RANKS: tl.constexpr):
    """Compute inverses (B, r, r) = L^-1 with G + shift = L L^T, G the sum of grams (B * splits, r, r). Grid: (B,).

    The diagonal is multiplied by 1 + 16 n eps, the shift of `cholesky_qr`; an empty column gets a length of 1. ADDENDS
    is the number of partial sums that are loaded at once. The kernel does Gauss elimination on [G | I], one column of L
    at a time: scaled by 1 over the roots of the pivots, I becomes L^-1. A pivot that is not positive or not finite
    gives NaN, and so does any NaN in G.
    """
    batch, ranks = tl.program_id(0), tl.arange(0, RANKS)
    n, r = sizes[0], sizes[1]
    i, j = ranks[:, None], ranks[None, :]
    inside = _inside(ranks, ranks, r, r)
    gram = tl.zeros((RANKS, RANKS), tl.float64)
    for start in range(0, splits, ADDENDS):
        split = (start + tl.arange(0, ADDENDS))[:, None, None]
        addends = (
            grams[0] + (batch * splits + split).to(tl.int64) * grams[1] + (i * grams[2] + j * grams[3])[None, :, :]
        )
        gram += tl.sum(tl.load(addends, mask=(split < splits) & inside[None, :, :], other=0.0), axis=0)
    empty = tl.where(gram == 0.0, 1.0, 0.0).to(tl.float64)
    # A Python float would be passed as float32, in which this value is 1.
    shifted = n * tl.full((1, 1), SIXTEEN_EPS, tl.float64) + 1.0
    gram = tl.where(i == j, gram * shifted + empty, gram)
    inverse = tl.where(i == j, 1.0, 0.0).to(tl.float64)
    for k in range(0, r):
        column = tl.sum(tl.where(j == k, gram, 0.0), axis=1)[:, None]
        row = tl.sum(tl.where(i == k, gram, 0.0), axis=0)[None, :]
        inverse_row = tl.sum(tl.where(i == k, inverse, 0.0), axis=0)[None, :]
        pivot = tl.sum(tl.where(i == k, column, 0.0), axis=0)[None, :]
        below = column / pivot
        # tl.where replaces a product with a mask, because 0 * NaN would carry a NaN into the rows above, which
        # have none.
        gram = tl.where((i > k) & (j > k), gram - below * row, gram)
        inverse = tl.where(i > k, inverse - below * inverse_row, inverse)
        inverse = tl.where(i == k, inverse_row / tl.sqrt(pivot), inverse)
    _store(inverses, batch, ranks, ranks, r, r, inverse)


@triton.jit
def orthonormal(p, first, second, out, sizes, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Compute out = (P L1^-T) L2^-T with the passes' Cholesky factors, in float64 and then rounded; `out` may be P
    itself. Grid: (row blocks, B)."""
    block, batch = tl.program_id(0), tl.program_id(1)
    n, r = sizes[0], sizes[1]
    rows, ranks = block * ROWS + tl.arange(0, ROWS), tl.arange(0, RANKS)
    a = _tile(p, batch, rows, ranks, n, r).to(tl.float64)
    a = _times_transposed(a, first, batch, r, RANKS)
    a = _times_transposed(a, second, batch, r, RANKS)
    _store(out, batch, rows, ranks, n, r, a.to(tl.float32))


@triton.jit
def copy_unless(finite, before, out, sizes, BLOCK: tl.constexpr):
    """Copy `before` (B, n, m) onto `out`, both contiguous, if the bool at `finite` is False. Grid: (programs, B)."""
    batch = tl.program_id(1).to(tl.int64)
    if tl.load(finite[0]) == 0:
        numel = tl.cast(sizes[0], tl.int64) * sizes[1]
        for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
            elements = start + tl.arange(0, BLOCK)
            values = tl.load(before[0] + batch * before[1] + elements, mask=elements < numel)
            tl.store(out[0] + batch * out[1] + elements, values, mask=elements < numel)
