"""Triton's kernels beside torch's own way of computing the same, eager and compiled."""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from optimus_cc_ext.compressors.fast import fast_compressor
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.compressors.orthogonalize import cholesky_qr
from scripts.bench.compressors.timing import Work

__all__ = ["EAGER", "contenders"]

OURS, EAGER, COMPILED = "ours", "torch, eager", "torch, compiled"
Contenders = dict[str, Work | None]
"""Works by contender; None if only a GPU can run the work."""


def contenders(device: torch.device, shape: tuple[int, int, int]) -> Iterator[tuple[str, Contenders]]:
    """Yield (case, contenders) for a batch of matrices of this shape, for each compression rank of 16, 64 and 128 that
    the matrices allow.

    Raises:
        SystemExit: the results of a case's contenders differ.
    """
    layers, n, m = shape
    generator = private_generator(4, "bench kernels", device="cpu")
    on_gpu, ours = device.type == "cuda", fast_compressor()
    gradient, residual = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    gradient = gradient.bfloat16()
    for r in (each for each in (16, 64, 128) if 4 * each <= min(n, m)):
        p, q = (torch.randn(layers, side, r, generator=generator).to(device) for side in (n, m))
        total, basis = gradient + residual, torch.linalg.qr(p).Q
        into = [torch.empty_like(total), torch.empty_like(p), torch.empty_like(q)]
        cases: dict[str, tuple[Work, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
            "sum and project": (
                lambda q=q, into=into: ours.project_sum(gradient, residual, q, total=into[0], out=into[1]) or into[1],
                _sum_and_project, (gradient, residual, q),
            ),
            "back project": (partial(ours.back_project, total, basis, out=into[2]), _back_project, (total, basis)),
            "orthogonalize": (partial(ours.orthogonalize, p, out=torch.empty_like(p)), cholesky_qr, (p,)),
            "reconstruct": (partial(ours.reconstruct, p, q, out=torch.empty_like(total)), _reconstruct, (p, q)),
        }  # fmt: skip
        for name, (work, plain, given) in cases.items():
            case = f"{name}, {layers} x {n} x {m}, rank {r}"
            yield case, _compared(case, work if on_gpu else None, plain, given)


def _compared(
    case: str, ours: Work | None, plain: Callable[..., torch.Tensor], given: tuple[torch.Tensor, ...]
) -> Contenders:
    compiled = None if ours is None else _compiled(case, plain, given)
    works: Contenders = {OURS: ours, EAGER: partial(plain, *given), COMPILED: compiled}
    expected = plain(*given).double()
    for name, work in works.items():
        if work is not None:
            off = float((work().double() - expected).norm() / expected.norm())  # type: ignore[attr-defined]
            # fp32 products in different orders; a basis amplifies their rounding by the condition of Gaussian columns.
            if not off < 1e-4:
                raise SystemExit(f"{case}: {name} is {off:.1e} off")
    return works


def _compiled(case: str, plain: Callable[..., torch.Tensor], given: tuple[torch.Tensor, ...]) -> Work | None:
    work = partial(torch.compile(plain), *given)
    try:
        work()
    except Exception as error:  # torch's compiler raises errors of classes of its own
        print(f"{case}: torch cannot compile it: {error!r:.200}", file=sys.stderr)
        return None
    return work


def _sum_and_project(gradient: torch.Tensor, residual: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (gradient + residual) @ q


def _back_project(total: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return total.mT @ p


def _reconstruct(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p @ q.mT
