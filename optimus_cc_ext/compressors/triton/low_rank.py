"""Low-rank compressor with Triton's kernels for matrices that the kernels take, and `FastLowRank` for others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.compressors.triton import launches


class TritonLowRank(FastLowRank):
    """Compressor that uses the kernels for matrices that they take, and its parent's torch code for others.

    `reconstruct` and `subtract_reconstruction` choose by the factors alone, by their dtype, device and rank: both ends
    of a link make the same choice, and equal factors give equal bits. This holds between GPUs of one generation; the
    tensor cores of another one may round differently, as torch's own products do.
    """

    @torch.no_grad()
    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        if not _taken(matrices, factors=(q,)):
            return super().project(matrices, q, out)
        out = _new(out, matrices, (*matrices.shape[:2], q.shape[-1]))
        return launches.project_sum(matrices, None, q, total=None, out=out, scratch=self._scratch)

    @torch.no_grad()
    def project_sum(self, matrices: Tensor, residual: Tensor | None, q: Tensor, *, total: Tensor, out: Tensor) -> None:
        if _taken(matrices, residual, total, factors=(q,)):
            launches.project_sum(matrices, residual, q, total=total, out=out, scratch=self._scratch)
        else:
            super().project_sum(matrices, residual, q, total=total, out=out)

    @torch.no_grad()
    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        if not _orthogonalized(p):
            return super().orthogonalize(p, out)
        return launches.orthogonalize(p, _new(out, p, p.shape), self._scratch)

    @torch.no_grad()
    def orthogonalize_all(self, ps: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        rest = []
        for pair in zip(ps, outs, strict=True):
            if _orthogonalized(pair[0]):
                launches.orthogonalize(*pair, self._scratch)
            else:
                rest.append(pair)
        super().orthogonalize_all([p for p, _ in rest], [out for _, out in rest])

    @torch.no_grad()
    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        if not _taken(matrices, factors=(p,)):
            return super().back_project(matrices, p, out)
        out = _new(out, matrices, (matrices.shape[0], matrices.shape[2], p.shape[-1]))
        return launches.back_project(matrices, p, out, self._scratch)

    @torch.no_grad()
    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        if not _taken(factors=(p, q)):
            return super().reconstruct(p, q, out)
        return launches.reconstruct(p, q, _new(out, p, (p.shape[0], p.shape[1], q.shape[1])))

    @torch.no_grad()
    def subtract_reconstruction(self, total: Tensor, p: Tensor, q: Tensor, share: float = 1.0) -> None:
        if _taken(factors=(p, q)):
            launches.subtract_reconstruction(total, p, q, share)
        else:
            super().subtract_reconstruction(total, p, q, share)


def _taken(*large: Tensor | None, factors: tuple[Tensor, ...]) -> bool:
    r = factors[0].shape[-1]
    large_fit = all(launches.supported(t, r) for t in large if t is not None)
    return large_fit and all(launches.takes_factors(factor, r) for factor in factors)


def _orthogonalized(p: Tensor) -> bool:
    return _taken(factors=(p,)) and p.shape[-1] <= min(p.shape[-2], launches.MAX_ORTHOGONALIZED_RANK)


def _new(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device) if out is None else out
