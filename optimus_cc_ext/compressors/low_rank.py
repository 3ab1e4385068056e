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

__all__ = ["FastLowRank", "LowRank"]


class LowRank(Protocol):
    """The four phases. B matrices of n x m at rank r, r <= min(n, m) (`policy.effective_rank`).

    Inputs may be bf16, fp16, fp32 or fp64, mixed; the result is fp32, or fp64 where an input is.
    `out` has the result's shape and dtype; `orthogonalize` alone also writes into another dtype, and over its
    input. Nothing is differentiated: `out` may require grad (Megatron's receive buffers do), no graph is
    recorded. A NaN or Inf in a matrix reaches that matrix's results as NaN or Inf: never an exception,
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


class FastLowRank:
    """The version that training uses: one batched product per phase, `cholesky_qr` in between. No state."""

    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return _product(matrices, q, out)

    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        return cholesky_qr(p, out)

    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        return _product(matrices.mT, p, out)

    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return _product(p, q.mT, out)


@torch.no_grad()
def _product(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return torch.bmm(a.to(dtype), b.to(dtype), out=out)
