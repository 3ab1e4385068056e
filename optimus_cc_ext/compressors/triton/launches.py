"""The low-rank step on a GPU, with passes over large matrices that Triton fuses and torch cannot.

Every function takes its grid from shapes alone, synchronises nothing, and with a `Scratch` that has seen the shapes
allocates nothing: once the first call has compiled it, a CUDA graph can capture it. All raise ValueError if a shape
does not fit the others. The orthogonalisation multiplies in float64.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from optimus_cc_ext.compressors.scratch import Scratch

OLDEST_TRITON = (3, 6)
"""The first release of Triton that compiles these kernels. Older ones are untested; some lack float64 products, tuples
as arguments, or both."""

TORCH_WITH_IT = (2, 10)
"""The first release of torch that brings `OLDEST_TRITON`; torch 2.9 brings Triton 3.5."""

try:
    import triton

    from optimus_cc_ext.compressors.triton import kernels

    # Importing triton decorates its own functions, so the value of TRITON_INTERPRET at that moment counts.
    INTERPRETED = not isinstance(kernels.add_up, triton.runtime.JITFunction)
    AVAILABLE = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= OLDEST_TRITON
except ImportError:
    INTERPRETED, AVAILABLE = False, False

MAX_RANK = 128
"""Largest rank of the kernels: a tile of P or Q with more columns does not fit in registers."""

MAX_ORTHOGONALIZED_RANK = 64
"""Largest rank of the orthogonalisation: at twice the rank, the float64 tile of the Cholesky factor, 128 x 128, takes
128 KiB and does not fit in registers."""

PROGRAMS = 512
"""Number of programs that a launch should have: about four for each of an H100's 132 multiprocessors."""

MAX_SPLITS = 32
"""Largest number of partial sums that `add_up` adds in one launch."""

NARROW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *NARROW)

PRECISION = "tf32x3"
"""Precision of fp32 products: fp32 on tensor cores but for the last bit or two, 2^-22 of a product. Plain TF32 leaves
2^-11, not exact enough for the law of lossless limits; "ieee" multiplies in the plain fp32 units."""

# The rows (and columns) of one program are the most that fit the registers without spilling, compiled for A100 and H100
# in fp32, which needs most.
PROJECTION_TILE = (64, 32)
PRODUCT_TILE = (64, 128)
GRAM_ROWS = 64

COPIED = 1024
"""Number of elements that one program copies at a time."""


def lacking() -> str | None:
    """Return the reason why this environment's Triton cannot compile the kernels, with the cure; None: it can."""
    if AVAILABLE:
        return None
    try:
        found = f"Triton {version('triton')} is too old"
    except PackageNotFoundError:
        found = "Triton is not installed"
    needed, torch_with_it = (".".join(map(str, release)) for release in (OLDEST_TRITON, TORCH_WITH_IT))
    return (
        f"{found}: the kernels need Triton {needed} or newer. Install torch {torch_with_it} or newer, which brings it"
    )


def supported(matrices: Tensor, r: int) -> bool:
    """Return whether the kernels take a batch of matrices (B, n, m) at rank r: `takes_factors`, and contiguous rows."""
    rows_are_contiguous = matrices.dim() == 3 and (matrices.stride(-1) == 1 or matrices.shape[-1] == 1)
    return rows_are_contiguous and takes_factors(matrices, r)


def takes_factors(p: Tensor, r: int) -> bool:
    """Return whether the kernels take P or Q: fp32, bf16 or fp16 on a GPU, of any strides; also on a CPU if Triton
    interprets (tests).

    `reconstruct` and `subtract_reconstruction` ask no more, so that both ends of a link get the same answer.
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
) -> Tensor:
    """Compute total = matrices + residual and out = P = total Q, reading and writing each large matrix once.

    Args:
        matrices: (B, n, m), fp32, bf16 or fp16.
        residual: (B, n, m) of any of these dtypes; None stands for zero.
        q: (B, m, r), fp32, bf16 or fp16.
        total: (B, n, m), the sum; may be `matrices` or `residual` itself. None: it is not written.
            P is of the sum in fp32, whatever `total` rounds it to.
        out: (B, n, r).
        scratch: keeps the partial sums between calls.
    """
    _sizes(matrices, p=out, q=q, residual=residual, total=total)
    return _project(matrices, residual, q, total, out, scratch)


def back_project(matrices: Tensor, p: Tensor, out: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Compute out = Q' = M^T P: (B, n, m), (B, n, r) -> (B, m, r), in fp32, bf16 or fp16; reads the matrices once."""
    _sizes(matrices, p=p, q=out)
    return _project(matrices.mT, None, p, None, out, scratch)


def reconstruct(p: Tensor, q: Tensor, out: Tensor) -> Tensor:
    """Compute out = P Q^T, rounded to its dtype: (B, n, r), (B, m, r) -> (B, n, m).

    The bits depend on P, Q, their dtypes and the rank: not on strides or sizes, and not on which of this function
    and `subtract_reconstruction` computes them.
    """
    _multiply_out(p, q, out, None)
    return out


def subtract_reconstruction(total: Tensor, p: Tensor, q: Tensor, share: float = 1.0) -> None:
    """Compute total -= share * R, with R as `reconstruct` writes it to an `out` of P's dtype; one pass over `total`."""
    _multiply_out(p, q, None, total, share)


def orthogonalize(p: Tensor, out: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Do `orthogonalize.cholesky_qr` for r <= `MAX_ORTHOGONALIZED_RANK`, in five launches, without a float64 copy of P.

    Args:
        p: (B, n, r), fp32, bf16 or fp16, r <= n. Of 16 bits it is first copied to fp32.
        out: (B, n, r); may be `p` itself.
        scratch: keeps intermediate tensors between calls.
    """
    batch, n, r = p.shape
    if out.shape != p.shape or not 1 <= r <= min(n, MAX_ORTHOGONALIZED_RANK):
        raise ValueError(
            f"expected two tensors (B, n, r), r <= n and r <= {MAX_ORTHOGONALIZED_RANK}, "
            f"got {tuple(p.shape)} and {tuple(out.shape)}"
        )
    scratch = scratch or Scratch()
    if p.dtype in NARROW:
        # Triton's compiler fails on products in float64 of values that were loaded in 16 bits.
        p = scratch.take("wide_p", tuple(p.shape), torch.float32, p.device).copy_(p)
    take = partial(scratch.take, dtype=torch.float64, device=p.device)
    first, second = (take(name, (batch, r, r)) for name in ("first_inverse", "second_inverse"))
    splits = _splits(batch, n, GRAM_ROWS)
    grams = take("partial_grams", (batch * splits, r, r))
    tile: dict[str, int] = {"ROWS": GRAM_ROWS, "RANKS": _padded(r), "num_warps": 4 if r <= 32 else 8}
    for inverse, following in ((None, first), (first, second)):
        _launch(kernels.partial_grams, (splits, batch), (p, inverse, grams), (n, r), splits=splits, **tile)
        inverse_factor(grams, n, following)
    _launch(kernels.orthonormal, (triton.cdiv(n, GRAM_ROWS), batch), (p, first, second, out), (n, r), **tile)
    return out


def inverse_factor(grams: Tensor, n: int, out: Tensor) -> Tensor:
    """Compute out = L^-1 of G = L L^T, (B, r, r); G is the sum of `grams` (B * splits, r, r) and `cholesky_qr`'s shift.

    Args:
        grams: float64, the parts of one matrix after those of the other.
        n: rows of the matrix, from which the shift follows.
        out: float64.
    """
    batch, r, _ = out.shape
    splits, ranks = grams.shape[0] // batch, _padded(r)
    warps = max(1, ranks**2 // 512)
    _launch(
        kernels.inverse_factor, (batch,), (grams, out), (n, r),
        splits=splits, ADDENDS=max(1, 1024 * warps // ranks**2), RANKS=ranks, num_warps=warps,
    )  # fmt: skip
    return out


def _project(
    matrices: Tensor, residual: Tensor | None, q: Tensor, total: Tensor | None, out: Tensor, scratch: Scratch | None
) -> Tensor:
    (batch, n, m), r = matrices.shape, q.shape[-1]
    rows, columns = PROJECTION_TILE
    blocks = triton.cdiv(n, rows)
    splits = _splits(batch * blocks, m, columns)
    # A sum that is not split into parts is written straight to `out`.
    take = (scratch or Scratch()).take
    sums = out if splits == 1 else take("partial_sums", (batch * splits, n, r), torch.float32, out.device)
    _launch(
        kernels.sum_and_project, (blocks, splits, batch), (matrices, residual, q, total, sums), (n, m, r),
        splits=splits, ROWS=rows, COLUMNS=columns, RANKS=_padded(r), PRECISION=PRECISION,
        num_warps=4 if r <= 64 else 8, num_stages=2,
    )  # fmt: skip
    return out if splits == 1 else add_up(sums, out)


def add_up(partial: Tensor, out: Tensor) -> Tensor:
    """Compute out (B, n, r), the sums of each matrix's splits in `partial` (B * splits, n, r), fp32; splits <=
    `MAX_SPLITS`."""
    batch, n, r = out.shape
    splits = partial.shape[0] // batch
    addends = triton.next_power_of_2(splits)
    block = 4096 // addends
    _launch(
        kernels.add_up, (triton.cdiv(n * r, block), batch), (partial, out), (n, r),
        splits=splits, ADDENDS=addends, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def copy_unless(finite: Tensor, before: Tensor, out: Tensor) -> None:
    """Copy `before` onto `out`, both contiguous, (B, n, m), if `finite`, a 0-dim bool tensor, is False. Otherwise
    neither tensor is read or written.
    """
    batch, n, m = out.shape
    programs = max(1, min(PROGRAMS // batch, triton.cdiv(n * m, COPIED)))
    _launch(kernels.copy_unless, (programs, batch), (finite, before, out), (n, m), BLOCK=COPIED, num_warps=4)


def _launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], **options: Any
) -> None:
    """Run `kernel` on `grid` programs, with the arguments in the order that the module `kernels` describes."""
    kernel[grid](*(None if tensor is None else (tensor, *tensor.stride()) for tensor in tensors), sizes, **options)


def _padded(r: int) -> int:
    """Return the columns of a tile of P or Q: at least 16, the smallest side that tensor cores multiply."""
    return max(16, triton.next_power_of_2(r))


def _splits(programs: int, length: int, step: int) -> int:
    """Return the number of parts into which a sum over `length`, `step` at a time, is split if programs are few."""
    return max(1, min(triton.cdiv(PROGRAMS, programs), triton.cdiv(length, step), MAX_SPLITS))


def _multiply_out(p: Tensor, q: Tensor, out: Tensor | None, total: Tensor | None, share: float = 1.0) -> None:
    to = out if out is not None else total
    assert to is not None
    batch, n, m, r = _sizes(to, p=p, q=q)
    rows, columns = PRODUCT_TILE
    _launch(
        kernels.multiply_out, (triton.cdiv(n, rows), triton.cdiv(m, columns), batch), (p, q, out, total), (n, m, r),
        share=share, ROWS=rows, COLUMNS=columns, RANKS=_padded(r), STEP=min(_padded(r), 32),
        # Triton's interpreter cannot multiply bf16.
        WIDEN=INTERPRETED or p.dtype != q.dtype or p.dtype not in NARROW,
        PRECISION=PRECISION, num_warps=8, num_stages=2,
    )  # fmt: skip


def _sizes(matrices: Tensor, *, p: Tensor, q: Tensor, **like_matrices: Tensor | None) -> tuple[int, int, int, int]:
    """Return the sizes B, n, m, r of M (B, n, m), P (B, n, r) and Q (B, m, r), which have to fit."""
    batch, n, m = matrices.shape
    r = p.shape[-1]
    fitting = all(other is None or other.shape == matrices.shape for other in like_matrices.values())
    if not fitting or p.shape != (batch, n, r) or q.shape != (batch, m, r) or not 1 <= r <= MAX_RANK:
        shapes = {"p": p, "q": q, **like_matrices}
        found = ", ".join(f"{name} {tuple(t.shape)}" for name, t in shapes.items() if t is not None)
        raise ValueError(f"matrices {(batch, n, m)} need P (B, n, r) and Q (B, m, r), r <= {MAX_RANK}; got {found}")
    return batch, n, m, r
