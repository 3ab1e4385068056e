"""The paper's compressor, matrix by matrix, column by column: slow, short, the oracle of `FastLowRank`."""

import torch
from torch import Tensor

from optimus_cc_ext.compressors.orthogonalize import gram_schmidt

__all__ = ["ReferenceLowRank"]


class ReferenceLowRank:
    """PowerSGD's algorithm 1 as it is written; the contract is `LowRank`'s."""

    @torch.no_grad()
    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return _deliver([_exact(m) @ _exact(q_i) for m, q_i in zip(matrices, q, strict=True)], out)

    @torch.no_grad()
    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        basis = gram_schmidt(p)
        return basis if out is None else out.copy_(basis)

    def orthogonalize_into(self, p: Tensor, out: Tensor) -> bool:
        self.orthogonalize(p, out)
        return False

    @torch.no_grad()
    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        return _deliver([_exact(m).T @ _exact(p_i) for m, p_i in zip(matrices, p, strict=True)], out)

    @torch.no_grad()
    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return _deliver([_exact(p_i) @ _exact(q_i).T for p_i, q_i in zip(p, q, strict=True)], out)

    @torch.no_grad()
    def deflate(self, matrices: Tensor, p: Tensor, q: Tensor, share: float) -> None:
        matrices.sub_(self.reconstruct(p, q), alpha=share)

    @torch.no_grad()
    def project_sum(self, matrices: Tensor, residual: Tensor | None, q: Tensor, *, total: Tensor, out: Tensor) -> None:
        total.copy_(_exact(matrices) if residual is None else _exact(matrices) + _exact(residual))
        self.project(total, q, out)

    @torch.no_grad()
    def factorize_sum(
        self,
        matrices: Tensor,
        residual: Tensor | None,
        q: Tensor,
        *,
        total: Tensor,
        p: Tensor,
        new_q: Tensor,
        scale: float = 1.0,
    ) -> None:
        basis = torch.empty_like(p, dtype=torch.float32)
        self.project_sum(matrices, residual, q, total=total, out=basis)
        p.copy_(self.orthogonalize(basis) * scale)
        self.back_project(total, p, out=new_q)

    @torch.no_grad()
    def subtract_reconstruction(self, total: Tensor, p: Tensor, q: Tensor) -> None:
        total.sub_(self.reconstruct(p, q, out=torch.empty_like(total, dtype=p.dtype)))


def _exact(matrix: Tensor) -> Tensor:
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _deliver(matrices: list[Tensor], out: Tensor | None) -> Tensor:
    stacked = torch.stack(matrices)
    return stacked if out is None else out.copy_(stacked)
