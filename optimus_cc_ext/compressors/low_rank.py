"""One step of subspace iteration on equally shaped matrices: what CB sends and what SC all-reduces.

    P  = M Q                 project          (SC: all-reduce P)
    P  = orth(P)             orthogonalize
    Q' = M^T P               back_project     (SC: all-reduce Q')
    M ~= P Q'^T              reconstruct

PowerSGD (Vogels et al. 2019, algorithm 1); Optimus-CC uses it for both directions of traffic.
"""

from typing import Protocol

import torch
from torch import Tensor

from optimus_cc_ext.compressors.orthogonalize import cholesky_qr
from optimus_cc_ext.compressors.scratch import Scratch

__all__ = ["FastLowRank", "LowRank"]


class LowRank(Protocol):
    """The four phases. B matrices of n x m at rank r, r <= min(n, m) (`policy.effective_rank`).

    Inputs may be bf16, fp16, fp32 or fp64, mixed; the result is fp32, or fp64 where an input is.
    `out` has the result's shape and may have another dtype, to which the result is then rounded; `orthogonalize`
    also writes over its input. Nothing is differentiated: `out` may require grad (Megatron's receive buffers do),
    no graph is recorded. A NaN or Inf in a matrix reaches that matrix's results as NaN or Inf: never an exception,
    never all finite.
    """

    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        """P = M Q: (B, n, m), (B, m, r) -> (B, n, r)."""
        ...

    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        """An orthonormal basis of P's columns: (B, n, r) -> (B, n, r). ValueError where n < r."""
        ...

    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        """Q' = M^T P: (B, n, m), (B, n, r) -> (B, m, r)."""
        ...

    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        """P Q^T: (B, n, r), (B, m, r) -> (B, n, m). Equal factors give equal bits, on both ends of a link."""
        ...

    def deflate(self, matrices: Tensor, p: Tensor, q: Tensor, share: float) -> None:
        """M -= share * P Q^T, in place, all of one dtype, fp32 or fp64: what the factors leave out."""
        ...


class FastLowRank:
    """The version that training uses: one batched product per phase, `cholesky_qr` in between.

    It remembers nothing, but keeps the memory of its intermediate results: where `out` is given, a second call on
    the same shapes and dtypes allocates nothing. Calls must be ordered on one stream.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return self._product(matrices, q, out)

    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        return cholesky_qr(p, out, self._scratch)

    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        return self._product(matrices.mT, p, out)

    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return self._product(p, q.mT, out)

    @torch.no_grad()
    def deflate(self, matrices: Tensor, p: Tensor, q: Tensor, share: float) -> None:
        matrices.baddbmm_(p, q.mT, alpha=-share)

    @torch.no_grad()
    def _product(self, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = self._widened("left", a, dtype), self._widened("right", b, dtype)
        if out is None or out.dtype == dtype:
            return torch.bmm(a, b, out=out)
        return out.copy_(torch.bmm(a, b, out=self._scratch.take("wide", out.shape, dtype, out.device)))

    def _widened(self, side: str, t: Tensor, dtype: torch.dtype) -> Tensor:
        return t if t.dtype == dtype else self._scratch.take(side, t.shape, dtype, t.device).copy_(t)
