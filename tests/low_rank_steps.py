"""Matrices to compress, one step of compression, and the error of its result: for the compressors' tests."""

import pytest
import torch
from torch import Tensor

from optimus_cc_ext.compressors.low_rank import FastLowRank, LowRank, ReferenceLowRank, initial_q
from optimus_cc_ext.compressors.numerics import private_generator

__all__ = ["BOTH", "EPS32", "first_q", "gaussian", "step", "with_spectrum", "worst_error"]

EPS32 = torch.finfo(torch.float32).eps
BOTH = pytest.mark.parametrize("compressor", [FastLowRank(), ReferenceLowRank()], ids=["fast", "reference"])


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def with_spectrum(n: int, m: int, smallest_exponent: float, *, seed: int = 0, batch: int = 2) -> Tensor:
    """Return (batch, n, m) in fp32 whose singular values fall from 1 to 10**smallest_exponent."""
    k = min(n, m)
    left = torch.linalg.qr(gaussian(batch, n, k, seed=seed, dtype=torch.float64)).Q
    right = torch.linalg.qr(gaussian(batch, m, k, seed=seed + 1000, dtype=torch.float64)).Q
    return ((left * torch.logspace(0, smallest_exponent, k, dtype=torch.float64)) @ right.mT).float()


def first_q(batch: int, m: int, r: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return initial_q(batch, m, r, generator=private_generator(seed), device="cpu", dtype=dtype)


def step(compressor: LowRank, matrices: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return P, Q' and the matrices that the other side reconstructs from them."""
    p = compressor.orthogonalize(compressor.project(matrices, q))
    q_new = compressor.back_project(matrices, p)
    return p, q_new, compressor.reconstruct(p, q_new)


def worst_error(approximation: Tensor, matrices: Tensor) -> float:
    """Return the largest error of an entry, in units of the matrix's largest entry."""
    error = (approximation.double() - matrices.double()).abs().amax((-2, -1))
    return (error / matrices.double().abs().amax((-2, -1))).max().item()
