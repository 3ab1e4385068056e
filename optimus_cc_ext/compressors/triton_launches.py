"""The low-rank step on a GPU, with the passes over large matrices fused by Triton: what torch cannot fuse.

Bytes of large matrices that a message of CB moves, per element of a bf16 gradient with an fp32 residual and an fp32
sum: 2 + 4 read and 4 written (`project_sum`), 4 read (`back_project`), 4 read and 4 written
(`subtract_reconstruction`). Every function takes its grid from shapes alone, asks the host nothing, and with a
`Scratch` that has seen the shapes allocates nothing, so that a CUDA graph can capture it, once the first call has
compiled it.

Products of fp32 are 3xTF32: each factor is split in two TF32 halves, and the three products that matter are
accumulated in fp32. That is fp32 but for the last bit or two (2^-22 of a product, where plain TF32 leaves 2^-11), on
tensor cores; "ieee" multiplies in the plain fp32 units, of which Hopper has a seventh of the rate.
The orthogonalisation multiplies in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optimus_cc_ext.compressors.scratch import Scratch

try:
    import triton

    from optimus_cc_ext.compressors import triton_kernels as kernels

    # The functions of triton's own library are decorated when it is imported: its version of the environment counts.
    INTERPRETED = not isinstance(kernels.add_up, triton.runtime.JITFunction)
    # torch 2.11 brings 3.6. Older ones are untested; some lack float64 products, tuples as arguments, or both.
    AVAILABLE = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
except ImportError:
    INTERPRETED, AVAILABLE = False, False

__all__ = [
    "MAX_ORTHOGONALIZED_RANK",
    "MAX_RANK",
    "back_project",
    "orthogonalize",
    "project_sum",
    "reconstruct",
    "subtract_reconstruction",
    "supported",
]

MAX_RANK = 128
"""Above it a tile of P or Q no longer fits in registers."""

MAX_ORTHOGONALIZED_RANK = 64
"""Above it the r x r float64 tile of the Cholesky factor no longer does: 128 x 128 of them are 128 KiB."""

PROGRAMS = 512
"""How many programs a launch should have: about four for each of an H100's 132 multiprocessors."""

MAX_SPLITS = 32
"""Partial sums that are added in one go."""

NARROW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *NARROW)

Precision = Literal["tf32x3", "tf32", "ieee"]


def supported(matrices: Tensor, r: int) -> bool:
    """Whether these kernels take a batch of matrices (B, n, m) at this compression rank.

    On a GPU, in fp32, bf16 or fp16, of contiguous rows (any row stride and batch stride), r <= `MAX_RANK`. On a CPU
    only where triton interprets its kernels instead of compiling them, which is for tests.
    """
    rows_are_contiguous = matrices.dim() == 3 and (matrices.stride(-1) == 1 or matrices.shape[-1] == 1)
    return rows_are_contiguous and takes_factors(matrices, r)


def takes_factors(p: Tensor, r: int) -> bool:
    """`supported`, but for the strides, which differ between the two ends of a link.

    `reconstruct` and `subtract_reconstruction` take any, so that this rule gives both ends the same answer.
    """
    on_device = p.device.type == "cuda" or (INTERPRETED and p.device.type == "cpu")
    return AVAILABLE and on_device and p.dtype in DTYPES and 1 <= r <= MAX_RANK


def project_sum(
    matrices: Tensor,
    residual: Tensor | None,
    q: Tensor,
    *,
    total: Tensor | None,
    out: Tensor,
    scratch: Scratch | None = None,
    precision: Precision = "tf32x3",
) -> Tensor:
    """total = matrices + residual and out = P = total Q, reading and writing each large matrix once.

    Args:
        matrices: (B, n, m), fp32, bf16 or fp16.
        residual: (B, n, m) of any of these dtypes; None stands for zero.
        q: (B, m, r), likewise.
        total: (B, n, m), where the sum goes; may be `matrices` or `residual` itself. None: it is not written.
            P is of the sum in fp32, whatever `total` rounds it to.
        out: (B, n, r).
        scratch: keeps the partial sums between calls.
        precision: of the products of fp32 values; "tf32" is not exact enough for the law of lossless limits.

    Raises:
        ValueError: if a shape does not fit the others.
    """
    batch, n, m, r = _sizes(matrices, p=out, q=q, residual=residual, total=total)
    tile = _projection_tile(r)
    splits = _splits(batch * triton.cdiv(n, tile.rows), m, tile.columns)
    partial_sums = _partial_sums(out, splits, scratch)
    kernels.sum_and_project[(triton.cdiv(n, tile.rows), splits, batch)](
        matrices,
        residual,
        q,
        total,
        partial_sums,
        (n, m, r),
        matrices.stride(),
        residual.stride() if residual is not None else (0, 0, 0),
        q.stride(),
        total.stride() if total is not None else (0, 0, 0),
        partial_sums.stride(),
        SPLITS=splits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        RANKS=_padded(r),
        PRECISION=precision,
        num_warps=tile.warps,
        num_stages=2,
    )
    return _add_up(partial_sums, out, splits)


def back_project(
    matrices: Tensor, p: Tensor, out: Tensor, scratch: Scratch | None = None, precision: Precision = "tf32x3"
) -> Tensor:
    """out = Q' = M^T P: (B, n, m), (B, n, r) -> (B, m, r), each in fp32, bf16 or fp16; reads the matrices once.

    Raises:
        ValueError: if a shape does not fit the others.
    """
    batch, n, m, r = _sizes(matrices, p=p, q=out)
    tile = _back_projection_tile(r)
    splits = _splits(batch * triton.cdiv(m, tile.columns), n, tile.rows)
    partial_sums = _partial_sums(out, splits, scratch)
    kernels.back_project[(triton.cdiv(m, tile.columns), splits, batch)](
        matrices,
        p,
        partial_sums,
        (n, m, r),
        matrices.stride(),
        p.stride(),
        partial_sums.stride(),
        SPLITS=splits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        RANKS=_padded(r),
        PRECISION=precision,
        num_warps=tile.warps,
        num_stages=2,
    )
    return _add_up(partial_sums, out, splits)


def reconstruct(p: Tensor, q: Tensor, out: Tensor, precision: Precision = "tf32x3") -> Tensor:
    """out = P Q^T, rounded to its dtype: (B, n, r), (B, m, r) -> (B, n, m).

    The bits depend on P, Q, their dtypes and the rank: not on strides or sizes, and not on which of this function
    and `subtract_reconstruction` computes them.

    Raises:
        ValueError: if a shape does not fit the others.
    """
    _multiply_out(p, q, out, out=out, precision=precision)
    return out


def subtract_reconstruction(
    total: Tensor, p: Tensor, q: Tensor, share: float = 1.0, precision: Precision = "tf32x3"
) -> None:
    """total -= share * what `reconstruct` writes at the other end, to an `out` of P's dtype; one pass over `total`.

    Raises:
        ValueError: if a shape does not fit the others.
    """
    _multiply_out(p, q, total, total=total, share=share, precision=precision)


def orthogonalize(p: Tensor, out: Tensor, scratch: Scratch | None = None) -> Tensor:
    """`orthogonalize.cholesky_qr` for r <= `MAX_ORTHOGONALIZED_RANK`, in five launches and without a float64 copy of P.

    Args:
        p: (B, n, r), fp32, bf16 or fp16, r <= n.
        out: (B, n, r); may be `p` itself.
        scratch: keeps the intermediate r x r tensors between calls.

    Raises:
        ValueError: if the shapes differ, or r is larger than n or than the limit.
    """
    batch, n, r = p.shape
    if out.shape != p.shape or not 1 <= r <= min(n, MAX_ORTHOGONALIZED_RANK):
        raise ValueError(
            f"expected two tensors (B, n, r), r <= n and r <= {MAX_ORTHOGONALIZED_RANK}, "
            f"got {tuple(p.shape)} and {tuple(out.shape)}"
        )
    take = partial((scratch or Scratch()).take, dtype=torch.float64, device=p.device)
    first, second = (take(name, (batch, r, r)) for name in ("first_inverse", "second_inverse"))
    inverse_factor(partial_grams(p, None, take), n, first)
    inverse_factor(partial_grams(p, first, take), n, second)
    tile = _gram_tile(r)
    kernels.orthonormal[(triton.cdiv(n, tile.rows), batch)](
        p,
        first,
        second,
        out,
        (n, r),
        p.stride(),
        out.stride(),
        ROWS=tile.rows,
        RANKS=_padded(r),
        num_warps=tile.warps,
    )
    return out


def partial_grams(p: Tensor, inverse: Tensor | None, take: Callable[[str, Sequence[int]], Tensor]) -> Tensor:
    """A^T A over each of several groups of rows, (B, splits, r, r) in float64, where A = P, or P L^-T.

    Args:
        p: (B, n, r).
        inverse: L^-1, (B, r, r) in float64, contiguous.
        take: gives the tensor of a name and a shape.
    """
    batch, n, r = p.shape
    tile = _gram_tile(r)
    splits = _splits(batch, n, tile.rows)
    grams = take("partial_grams", (batch, splits, r, r))
    kernels.partial_grams[(splits, batch)](
        p,
        inverse,
        grams,
        (n, r),
        p.stride(),
        SPLITS=splits,
        ROWS=tile.rows,
        RANKS=_padded(r),
        num_warps=tile.warps,
    )
    return grams


def inverse_factor(grams: Tensor, n: int, out: Tensor) -> Tensor:
    """L^-1 of G = L L^T, (B, r, r), where G is the sum of `grams` (B, splits, r, r) and the shift of `cholesky_qr`.

    Args:
        grams: contiguous, float64.
        n: rows of the matrix, from which the shift follows.
        out: contiguous, float64.
    """
    batch, splits, r, _ = grams.shape
    ranks = _padded(r)
    warps = max(1, ranks**2 // 512)
    kernels.inverse_factor[(batch,)](
        grams,
        out,
        n,
        r,
        SPLITS=splits,
        ADDENDS=min(triton.next_power_of_2(splits), max(1, 1024 * warps // ranks**2)),
        RANKS=ranks,
        num_warps=warps,
    )
    return out


class _Tile(NamedTuple):
    """What one program works on at a time; powers of two, from the rank alone.

    The largest that fit the registers without spilling, compiled for A100 and H100, in fp32, which needs the most.
    """

    rows: int
    columns: int
    warps: int


def _padded(r: int) -> int:
    """Ranks in a tile: 16 is the least that tensor cores multiply."""
    return max(16, triton.next_power_of_2(r))


def _projection_tile(r: int) -> _Tile:
    return _Tile(64, 32, 4 if r <= 64 else 8)


def _back_projection_tile(r: int) -> _Tile:
    return _Tile(32, 64, 4 if r <= 64 else 8)


PRODUCT_TILE = _Tile(64, 128, 8)


def _gram_tile(r: int) -> _Tile:
    return _Tile(64, _padded(r), 4 if r <= 32 else 8)


def _splits(programs: int, length: int, step: int) -> int:
    """Into how many parts a sum over `length`, `step` at a time, is split where there are few programs."""
    return max(1, min(triton.cdiv(PROGRAMS, programs), triton.cdiv(length, step), MAX_SPLITS))


def _partial_sums(out: Tensor, splits: int, scratch: Scratch | None) -> Tensor:
    """(B * splits, rows, r) in fp32; `out` itself where nothing is split."""
    if splits == 1:
        return out
    batch, rows, r = out.shape
    return (scratch or Scratch()).take("partial_sums", (batch * splits, rows, r), torch.float32, out.device)


def _add_up(partial_sums: Tensor, out: Tensor, splits: int) -> Tensor:
    if splits == 1:
        return out
    batch, rows, r = out.shape
    addends = triton.next_power_of_2(splits)
    block = 4096 // addends
    kernels.add_up[(triton.cdiv(rows * r, block), batch)](
        partial_sums,
        out,
        (rows, r),
        partial_sums.stride(),
        out.stride(),
        SPLITS=splits,
        ADDENDS=addends,
        BLOCK=block,
        num_warps=4,
    )
    return out


def _multiply_out(
    p: Tensor,
    q: Tensor,
    to: Tensor,
    *,
    precision: Precision,
    out: Tensor | None = None,
    total: Tensor | None = None,
    share: float = 1.0,
) -> None:
    batch, n, m, r = _sizes(to, p=p, q=q)
    tile = PRODUCT_TILE
    kernels.multiply_out[(triton.cdiv(n, tile.rows), triton.cdiv(m, tile.columns), batch)](
        p,
        q,
        out,
        total,
        share,
        (n, m, r),
        p.stride(),
        q.stride(),
        to.stride(),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        RANKS=_padded(r),
        STEP=min(_padded(r), 32),
        # Triton's interpreter cannot multiply bf16.
        WIDEN=INTERPRETED or p.dtype != q.dtype or p.dtype not in NARROW,
        PRECISION=precision,
        num_warps=tile.warps,
        num_stages=2,
    )


def _sizes(matrices: Tensor, *, p: Tensor, q: Tensor, **like_matrices: Tensor | None) -> tuple[int, int, int, int]:
    """B, n, m, r.

    Raises:
        ValueError: if a shape does not fit the others.
    """
    batch, n, m = matrices.shape
    r = p.shape[-1]
    fitting = all(other is None or other.shape == matrices.shape for other in like_matrices.values())
    if not fitting or p.shape != (batch, n, r) or q.shape != (batch, m, r) or not 1 <= r <= MAX_RANK:
        shapes = {"p": p, "q": q, **like_matrices}
        found = ", ".join(f"{name} {tuple(t.shape)}" for name, t in shapes.items() if t is not None)
        raise ValueError(f"matrices {(batch, n, m)} need P (B, n, r) and Q (B, m, r), r <= {MAX_RANK}; got {found}")
    return batch, n, m, r
