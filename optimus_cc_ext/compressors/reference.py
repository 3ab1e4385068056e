"""The paper's compressor, matrix by matrix, column by column: slow, short, the oracle of `FastLowRank`."""

from collections.abc import Sequence

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

    def orthogonalize_all(self, ps: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        for p, out in zip(ps, outs, strict=True):
            self.orthogonalize(p, out)

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
