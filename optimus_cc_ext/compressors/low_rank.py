"""One step of subspace iteration on equally shaped matrices: what CB sends and what SC all-reduces.

    1. P  = M Q                 project          (SC: all-reduce P)
    2. P  = orth(P)             orthogonalize
    3. Q' = M^T P               back_project     (SC: all-reduce Q')
    4. M ~= P Q'^T              reconstruct
    5. E  = M - P Q'^T          subtract_reconstruction

PowerSGD (Vogels et al. 2019, algorithm 1); Optimus-CC uses it for both directions of traffic.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from optimus_cc_ext.compressors.orthogonalize import cholesky_qr, cholesky_qr_all
from optimus_cc_ext.compressors.precision import fp32_products
from optimus_cc_ext.compressors.scratch import Scratch

__all__ = ["FastLowRank", "LowRank"]


class LowRank(Protocol):
    """The phases. B matrices of n x m at compression rank r, r <= min(n, m) (`policy.effective_rank`).

    Inputs may be bf16, fp16, fp32 or fp64, mixed; the result is fp32, or fp64 where an input is.
    `out` has the result's shape and may have another dtype, to which the result is then rounded; `orthogonalize`
    also writes over its input. Nothing is differentiated: `out` may require grad (Megatron's receive buffers do),
    no graph is recorded. A NaN or Inf in a matrix reaches that matrix's results as NaN or Inf: never an exception,
    never all finite.
    """

    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        """P = M Q: (B, n, m), (B, m, r) -> (B, n, r)."""
        ...

    def project_sum(self, matrices: Tensor, residual: Tensor | None, q: Tensor, *, total: Tensor, out: Tensor) -> None:
        """T = M + E and P = T Q.

        Args:
            matrices: M (B, n, m), fp32, bf16 or fp16; may be a strided view of a bucket, with contiguous rows.
            residual: E (B, n, m), fp32 or bf16; None: nothing is added.
            q: (B, m, r).
            total: T (B, n, m), fp32, contiguous; may be `residual` itself.
            out: P (B, n, r).
        """
        ...

    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        """An orthonormal basis of P's columns: (B, n, r) -> (B, n, r). ValueError where n < r."""
        ...

    def orthogonalize_all(self, ps: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """`orthogonalize` of several batches, whose B, n and r may differ, each into its out."""
        ...

    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        """Q' = M^T P: (B, n, m), (B, n, r) -> (B, m, r)."""
        ...

    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        """P Q^T: (B, n, r), (B, m, r) -> (B, n, m). Equal factors give equal bits, on both ends of a link."""
        ...

    def subtract_reconstruction(self, total: Tensor, p: Tensor, q: Tensor, share: float = 1.0) -> None:
        """T -= share * R in place, (B, n, m), where R is what the other end of a link makes of P and Q.

        P and Q are as they travel, of one dtype; R is bit for bit what `reconstruct` gives in an `out` of that
        dtype. What is remembered is what was sent.
        """
        ...


class FastLowRank:
    """The version that training uses: one batched product per phase, `cholesky_qr` in between.

    It remembers nothing, but keeps the memory of its intermediate results: where `out` is given, a second call on
    the same shapes and dtypes allocates nothing. Calls must be ordered on one stream.
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
            # Two 16-bit tensors would be added in 16 bits.
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
        # Not baddbmm_, which may add the product's terms to T one by one: the receiver has rounded their sum.
        total.sub_(self.reconstruct(p, q, self._scratch.take("arrives", total.shape, p.dtype, p.device)), alpha=share)

    def _multiply(self, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        """A B in fp32 or fp64, rounded to the dtype of `out`: (B, n, k), (B, k, m) -> (B, n, m)."""
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
