"""The factors that a compressor starts from: the first Q of a link, and the Q of every later step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.compressors.orthogonalize import cholesky_qr
from optimus_cc_ext.compressors.scratch import Scratch

__all__ = ["initial_q", "next_warm_start", "next_warm_starts", "private_generator"]


def private_generator(seed: int, *salt: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of our own; torch's global ones, which drive dropout and initialisation, are never touched.

    Args:
        seed: `--compression-seed`.
        salt: what this generator is for, e.g. ("compressed_backprop", stage). Equal arguments give the same
            stream in every process on every machine, different ones unrelated streams; 1 and "1" differ,
            and so do ("ab",) and ("a", "b").
        device: where it draws. A CPU and a CUDA generator of one seed draw different numbers.
    """
    key = repr((seed, *salt)).encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    # 63 bits: torch reads a seed as a signed 64-bit integer.
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


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
    """The first Q: `batch` orthonormal Gaussian factors, (batch, m, r).

    Drawn on the generator's device and moved to `device`: a CPU generator gives every device the same factor.

    Raises:
        ValueError: if r > m.
    """
    drawn = torch.randn(batch, m, r, generator=generator, device=generator.device, dtype=torch.float32)
    return cholesky_qr(drawn, out=torch.empty_like(drawn, dtype=dtype)).to(device)


@torch.no_grad()
def next_warm_start(
    q_new: Tensor, fallback: Tensor, compressor: LowRank, out: Tensor | None = None, scratch: Scratch | None = None
) -> Tensor:
    """The Q that the next step projects with, (B, m, r), fp32 (or fp64): an orthonormal basis of Q' = M^T P.

    PowerSGD carries Q' over as it is. The span is the same, so the next P spans the same, and mathematically
    nothing changes. Numerically it does: P = M (M^T P) has the square of M's condition, and directions below
    sqrt(eps) of the largest drown in rounding; with an orthonormal Q, P = M Q has M's own condition, and
    rank >= min(n, m) stays lossless to eps.

    Args:
        q_new: (B, m, r), what was sent.
        fallback: (B, m, r), e.g. the link's `initial_q`. Its columns stand in for those of Q' that hold
            nothing (a zero gradient gives Q' = 0, which would give P = 0 for ever) or nothing finite (a
            step that Megatron's loss scaler skips must not reach a later one). They are not orthogonal to
            the columns that stay; project does not need it.
        compressor: does the orthogonalisation.
        out: where to write the result, (B, m, r) of any floating dtype.
        scratch: keeps the intermediate tensors between calls; then nothing is allocated.

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
    """`next_warm_start` of several factors (B, m, r) in fp32 at once, in place."""
    compressor.orthogonalize_all(qs, qs)
    for q, fallback in zip(qs, fallbacks, strict=True):
        _replace_empty_columns(q, fallback, scratch)


def _replace_empty_columns(basis: Tensor, fallback: Tensor, scratch: Scratch) -> None:
    # Orthonormalised columns have length 1 or nearly 0. NaN compares false: it takes the fallback too.
    lengths = scratch.take("lengths", (basis.shape[0], 1, basis.shape[2]), basis.dtype, basis.device)
    torch.linalg.vector_norm(basis, dim=-2, keepdim=True, out=lengths)
    alive = torch.gt(lengths, 0.5, out=scratch.take("alive", lengths.shape, torch.bool, basis.device))
    torch.where(alive, basis, fallback, out=basis)
