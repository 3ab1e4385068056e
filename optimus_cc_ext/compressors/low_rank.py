"""Low-rank compression of equally shaped matrices: one step of subspace iteration, its message and its warm start.

    1. P  = M Q                 project          (SC: all-reduce P)
    2. P  = orth(P)             orthogonalize
    3. Q' = M^T P               back_project     (SC: all-reduce Q')
    4. M ~= P Q'^T              reconstruct
    5. E  = M - P Q'^T          subtract_reconstruction

This is PowerSGD (Vogels et al. 2019, algorithm 1), which Optimus-CC uses for activation gradients (compressed
backpropagation) and for data-parallel gradients (SC, selective stage compression). As in PowerSGD, an (n, m) matrix is
sent as two factors of r columns, so r*(n+m) values instead of n*m (`_should_compress` of PyTorch's `powerSGD_hook.py`
is the same rule as `pays`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimus_cc_ext.compressors.numerics import fp32_products
from optimus_cc_ext.compressors.orthogonalize import cholesky_qr, cholesky_qr_all, gram_schmidt
from optimus_cc_ext.compressors.scratch import Scratch


def effective_rank(n: int, m: int, compression_rank: int) -> int:
    """Return the rank to which an (n, m) matrix is really compressed: min(n, m, compression_rank).

    More columns than min(n, m) carry no information, and the orthogonalisation needs rows >= columns.

    Raises:
        ValueError: a dimension or the compression rank is not positive.
    """
    if n < 1 or m < 1:
        raise ValueError(f"a matrix to compress needs rows and columns, got {n} x {m}")
    if compression_rank < 1:
        raise ValueError(f"compression rank must be at least 1, got {compression_rank}")
    return min(n, m, compression_rank)


def packed_numel(n: int, m: int, r: int) -> int:
    """Count the values in the two factors P (n, r) and Q (m, r) together."""
    return r * (n + m)


def pays(n: int, m: int, compression_rank: int) -> bool:
    """Return whether the factors are smaller than the (n, m) matrix; if not, the matrix is sent uncompressed."""
    return packed_numel(n, m, effective_rank(n, m, compression_rank)) < n * m


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """Message of one compressed matrix: [P | Q], row by row, in one flat buffer.

    Both ends of a link build it from the same four numbers.

    Raises:
        ValueError: a size is not positive, r > min(n, m), or the dtype is not fp32, bf16 or fp16.
    """

    n: int
    """Rows of the matrix, and of P."""

    m: int
    """Number of columns of the matrix, and of rows of Q."""

    r: int
    """Number of columns of P and of Q."""

    dtype: torch.dtype
    """Wire format of the factors: torch.float32, torch.bfloat16 or torch.float16."""

    def __post_init__(self) -> None:
        if not 1 <= self.r <= min(self.n, self.m):
            raise ValueError(f"a {self.n} x {self.m} matrix has no factors of rank {self.r}: use effective_rank")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"factors are sent in float32, bfloat16 or float16, got {self.dtype}")

    @property
    def numel(self) -> int:
        """Number of values in one message."""
        return packed_numel(self.n, self.m, self.r)

    @property
    def scale(self) -> float:
        """Power of two that multiplies P, and divides Q, before the factors are rounded to the wire's dtype.

        P has orthonormal columns, so an entry of Q = M^T P reaches sqrt(n) times M's largest: in fp16 it would overflow
        even if M does not, and P's entries of 1/sqrt(n) would lose bits to subnormals. Scaled by c with 2 sqrt(n) <= c
        < 4 sqrt(n),
        |Q / c| <= max |M| / 2 and |P c| < 4 sqrt(n), which fp16 holds for n < 2^28.
        """
        if self.dtype != torch.float16:
            return 1.0
        return 2.0 ** (1 + math.ceil(math.log2(self.n) / 2))

    def split(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Return P (n, r) and Q (m, r) as views of `buffer`.

        Raises:
            ValueError: the buffer is not a flat contiguous message of this size and dtype.
        """
        if buffer.shape != (self.numel,) or buffer.dtype != self.dtype or not buffer.is_contiguous():
            raise ValueError(
                f"expected a contiguous message of {self.numel} values of {self.dtype}, "
                f"got shape {tuple(buffer.shape)} of {buffer.dtype}: do both ends agree on matrix and rank?"
            )
        p, q = buffer.split([self.n * self.r, self.m * self.r])
        return p.view(self.n, self.r), q.view(self.m, self.r)


class LowRank(ABC):
    """Interface of the phases, for B matrices of n x m at compression rank r, r <= min(n, m) (`effective_rank`).

    Inputs may be bf16, fp16, fp32 or fp64, mixed; the result is fp32, or fp64 if an input is. `out` has the result's
    shape and may have another dtype, to which the result is then rounded; `orthogonalize` may also overwrite its input.
    No graph is recorded, even if `out` requires grad, as Megatron's receive buffers do. A NaN or Inf in a matrix makes
    that matrix's results NaN or Inf: the phases neither raise an exception for it nor return only finite values.
    """

    @abstractmethod
    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Return P = M Q: (B, n, m), (B, m, r) -> (B, n, r)."""

    @abstractmethod
    def project_sum(self, matrices: Tensor, residual: Tensor | None, q: Tensor, *, total: Tensor, out: Tensor) -> None:
        """Write T = M + E and P = T Q.

        Args:
            matrices: M (B, n, m), fp32, bf16 or fp16; may be a strided view of a bucket, with contiguous rows.
            residual: E (B, n, m), fp32 or bf16; None: T = M.
            q: (B, m, r).
            total: T (B, n, m), fp32, contiguous; may be `residual` itself.
            out: P (B, n, r).
        """

    @abstractmethod
    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        """Return an orthonormal basis of P's columns: (B, n, r) -> (B, n, r). Raises ValueError if n < r."""

    def orthogonalize_all(self, ps: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """`orthogonalize` several batches, whose B, n and r may differ, each into its entry of `outs`."""
        for p, out in zip(ps, outs, strict=True):
            self.orthogonalize(p, out)

    @abstractmethod
    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        """Return Q' = M^T P: (B, n, m), (B, n, r) -> (B, m, r)."""

    @abstractmethod
    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Return P Q^T: (B, n, r), (B, m, r) -> (B, n, m). Equal factors give equal bits, so both ends of a link
        agree.
        """

    @abstractmethod
    def subtract_reconstruction(self, total: Tensor, p: Tensor, q: Tensor, share: float = 1.0) -> None:
        """Subtract in place: T -= share * R, (B, n, m), where R is the other end's reconstruction from P and Q.

        P and Q are the factors of the message, of one dtype; R equals, bit for bit, the output of `reconstruct` in an
        `out` of that dtype. So T becomes exactly the error of the message.
        """


class FastLowRank(LowRank):
    """Implementation that training uses: one batched product per phase, with `cholesky_qr` in between.

    It has no state but the memory of its intermediate results: if `out` is given, a second call with the same shapes
    and dtypes allocates nothing. Calls must be ordered on one stream.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    @torch.no_grad()
    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return self._multiply(matrices, q, out)

    @torch.no_grad()
    def project_sum(self, matrices: Tensor, residual: Tensor | None, q: Tensor, *, total: Tensor, out: Tensor) -> None:
        if residual is None:
            total.copy_(matrices)
        elif torch.float32 in (matrices.dtype, residual.dtype):
            torch.add(matrices, residual, out=total)
        else:
            # Without this cast torch would add two 16-bit tensors in 16 bits.
            total.copy_(matrices).add_(residual)
        self._multiply(total, q, out)

    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        return cholesky_qr(p, out, self._scratch)

    def orthogonalize_all(self, ps: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        cholesky_qr_all(ps, outs, self._scratch)

    @torch.no_grad()
    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        return self._multiply(matrices.mT, p, out)

    @torch.no_grad()
    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return self._multiply(p, q.mT, out)

    @torch.no_grad()
    def subtract_reconstruction(self, total: Tensor, p: Tensor, q: Tensor, share: float = 1.0) -> None:
        # baddbmm_ may add the product's terms to T one by one, while the receiver has rounded their sum.
        total.sub_(self.reconstruct(p, q, self._scratch.take("arrives", total.shape, p.dtype, p.device)), alpha=share)

    def _multiply(self, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        """Return A B in fp32 or fp64, rounded to the dtype of `out`: (B, n, k), (B, k, m) -> (B, n, m)."""
        dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = self._cast("left", a, dtype), self._cast("right", b, dtype)
        if out is None:
            out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
        exact = out if out.dtype == dtype else self._scratch.take("wide", out.shape, dtype, out.device)
        with fp32_products():
            torch.bmm(a, b, out=exact)
        return out if exact is out else out.copy_(exact)

    def _cast(self, side: str, t: Tensor, dtype: torch.dtype) -> Tensor:
        return t if t.dtype == dtype else self._scratch.take(side, t.shape, dtype, t.device).copy_(t)


class ReferenceLowRank(LowRank):
    """PowerSGD's algorithm 1 as the paper writes it, matrix by matrix, column by column: the slow oracle of
    `FastLowRank`.
    """

    @torch.no_grad()
    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return _deliver([_exact(m) @ _exact(q_i) for m, q_i in zip(matrices, q, strict=True)], out)

    @torch.no_grad()
    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        basis = gram_schmidt(p)
        return basis if out is None else out.copy_(basis)

    @torch.no_grad()
    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        return _deliver([_exact(m).T @ _exact(p_i) for m, p_i in zip(matrices, p, strict=True)], out)

    @torch.no_grad()
    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return _deliver([_exact(p_i) @ _exact(q_i).T for p_i, q_i in zip(p, q, strict=True)], out)

    @torch.no_grad()
    def project_sum(self, matrices: Tensor, residual: Tensor | None, q: Tensor, *, total: Tensor, out: Tensor) -> None:
        total.copy_(_exact(matrices) if residual is None else _exact(matrices) + _exact(residual))
        self.project(total, q, out)

    @torch.no_grad()
    def subtract_reconstruction(self, total: Tensor, p: Tensor, q: Tensor, share: float = 1.0) -> None:
        total.sub_(self.reconstruct(p, q, out=torch.empty_like(total, dtype=p.dtype)), alpha=share)


def _exact(matrix: Tensor) -> Tensor:
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _deliver(matrices: list[Tensor], out: Tensor | None) -> Tensor:
    stacked = torch.stack(matrices)
    return stacked if out is None else out.copy_(stacked)


@torch.no_grad()
def initial_q(
    batch: int,
    m: int,
    r: int,
    *,
    generator: torch.Generator,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw the first Q: `batch` orthonormal Gaussian factors, (batch, m, r).

    They are drawn on the generator's device and moved to `device`: a CPU generator gives every device the same factors.

    Raises:
        ValueError: if r > m.
    """
    drawn = torch.randn(batch, m, r, generator=generator, device=generator.device, dtype=torch.float32)
    return cholesky_qr(drawn, out=torch.empty_like(drawn, dtype=dtype)).to(device)


@torch.no_grad()
def next_warm_start(
    q_new: Tensor, fallback: Tensor, compressor: LowRank, out: Tensor | None = None, scratch: Scratch | None = None
) -> Tensor:
    """Return the Q that the next step projects with, (B, m, r), fp32 (or fp64): an orthonormal basis of Q' = M^T P.

    PowerSGD uses Q' itself. The basis has the same span, so the next P has the same span, and mathematically nothing
    changes. Numerically it does: P = M (M^T P) has the square of M's condition, and directions below sqrt(eps) of the
    largest are lost in rounding; with an orthonormal Q, P = M Q has M's own condition, and a compression rank >= min(n,
    m) stays lossless to eps.

    Args:
        q_new: (B, m, r), the Q that was sent.
        fallback: (B, m, r), e.g. the link's `initial_q`. Its columns replace the columns of Q' that are zero (a zero
            gradient gives Q' = 0, which would give P = 0 for ever) or not finite (a step that Megatron's loss scaler
            skips must not influence a later one). They are not orthogonal to the columns that stay, which `project`
            does not need.
        compressor: does the orthogonalisation.
        out: where to write the result, (B, m, r) of any floating dtype.
        scratch: keeps the intermediate tensors between calls; with it, nothing is allocated.

    Raises:
        ValueError: if the shapes differ or r > m.
    """
    if q_new.shape != fallback.shape:
        raise ValueError(f"fallback has shape {tuple(fallback.shape)}, the factor {tuple(q_new.shape)}")
    take = (scratch or Scratch()).take
    dtype = torch.promote_types(q_new.dtype, torch.float32)
    direct = out is not None and out.dtype == dtype and out is not fallback
    basis = out if out is not None and direct else take("basis", q_new.shape, dtype, q_new.device)
    compressor.orthogonalize(q_new, out=basis)
    _replace_empty_columns(basis, fallback, scratch or Scratch())
    if out is None:
        return basis.clone()
    return out if direct else out.copy_(basis)


@torch.no_grad()
def next_warm_starts(qs: Sequence[Tensor], fallbacks: Sequence[Tensor], compressor: LowRank, scratch: Scratch) -> None:
    """Replace several factors (B, m, r) in fp32 by their `next_warm_start`, with one orthogonalisation for all."""
    compressor.orthogonalize_all(qs, qs)
    for q, fallback in zip(qs, fallbacks, strict=True):
        _replace_empty_columns(q, fallback, scratch)


def _replace_empty_columns(basis: Tensor, fallback: Tensor, scratch: Scratch) -> None:
    # Orthonormalised columns have length 1 or nearly 0. For NaN the comparison is false, so it takes the fallback, too.
    lengths = scratch.take("lengths", (basis.shape[0], 1, basis.shape[2]), basis.dtype, basis.device)
    torch.linalg.vector_norm(basis, dim=-2, keepdim=True, out=lengths)
    alive = torch.gt(lengths, 0.5, out=scratch.take("alive", lengths.shape, torch.bool, basis.device))
    torch.where(alive, basis, fallback, out=basis)
