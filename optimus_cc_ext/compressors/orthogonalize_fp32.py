"""Cholesky QR of large matrices on a CPU: one pass in fp32 where one is enough, more where the matrix needs them.

    D = diag(A^T A)^-1/2,  D A^T A D = L L^T,  W = L^-1,  A <- A (W D)^T

The computed Gram matrix and factor are off by e, some 4e-7 of the columns' lengths. What comes out is then off
orthonormal by W e W^T: at most e times the largest squared length of W's rows, which is known as soon as W is, and
decides (on a CPU reading a value costs nothing; on a GPU it would stall, so there `cholesky_qr` always does two passes
in fp64):

    up to 4       done: orthonormal to about 1e-6
    up to 1000    once more, from the result, which is so close to orthonormal that 1 comes out then
    above, or NaN, or the factorisation broke down: the caller's fp64 passes

With columns scaled to length 1, random P (n x r, n > 1.5 r) and the P of a warm-started Q have 1 to 3.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from optimus_cc_ext.compressors import few_columns, triangles
from optimus_cc_ext.compressors.products import is_large, multiplies_fp32, multiply

__all__ = ["DONE", "is_for_fp32", "orthonormalize_fp32"]

_FEWEST_FLOPS, _FEWEST_FLOPS_OF_FEW_COLUMNS = 1 << 23, 1 << 18
"""Of one matrix's Gram matrix. Below, fp64 is as fast."""

DONE, _WORTH_ANOTHER = 4.0, 1000.0
_LENGTHS = 1e-30, 1e30
"""Squared lengths of columns between which fp32 loses nothing of a Gram matrix to its range."""

_FEW_VALUES = 1 << 20
"""Of P, fp32, that are turned at once where the result goes over it: 4 MB stay in a last-level cache."""

_FEW_COLUMNS = 64
"""Up to here a Gram matrix is factorised by NumPy, whose calls cost a third of torch's."""

_LEAF = 32
"""Columns that LAPACK factorises at once: a batch of 32 x 32 takes it a fortieth of the time of one of 128 x 128."""

Take = Callable[..., Tensor]
"""Scratch memory: (name, shape, dtype)."""


def is_for_fp32(p: Tensor) -> bool:
    """Whether bases of p (B, n, r) are sought in fp32 first: on a CPU, by shape alone."""
    _, n, r = p.shape
    fewest = _FEWEST_FLOPS_OF_FEW_COLUMNS if r <= _FEW_COLUMNS else _FEWEST_FLOPS
    return (
        p.dtype != torch.float64
        and is_large(p, 2 * n * r * r, fewest)
        and (multiplies_fp32() or few_columns.is_for_factors(r))
    )


def orthonormalize_fp32(p: Tensor, out: Tensor, take: Take) -> list[int]:
    """Write orthonormal bases of the columns of p (B, n, r) into out, both fp32 and contiguous; p may be out.

    Returns:
        The matrices that need more than fp32 can do; in `out` they are what they were in `p`, or have been turned
        into another basis of the same columns.
    """
    amplification = _pass(p, out, take)
    hopeless = [index for index, factor in enumerate(amplification) if not factor <= _WORTH_ANOTHER]  # NaN is not
    for index in (index for index, factor in enumerate(amplification) if DONE < factor <= _WORTH_ANOTHER):
        one = out[index : index + 1]
        if not _pass(one, one, take)[0] <= DONE:
            hopeless.append(index)
    return hopeless


def _pass(p: Tensor, out: Tensor, take: Take) -> list[float]:
    """out = P (W D)^T where W amplifies the error by what is `_WORTH_ANOTHER` pass at most, else P; p may be out.

    Returns:
        By how much it amplifies each matrix's, or NaN.
    """
    if few_columns.is_for_factors(p.shape[2]):
        return few_columns.orthonormalize(p, out, worth=_WORTH_ANOTHER)
    weights, amplification = _weights(p, take)
    for index, factor in enumerate(amplification):
        if not factor <= _WORTH_ANOTHER:
            weights[index].zero_().fill_diagonal_(1.0)
    _turn(p, weights, out, take)
    return amplification


def _turn(p: Tensor, weights: Tensor, out: Tensor, take: Take) -> None:
    """out = P W^T for a batch, W lower triangular; p may be out."""
    if p.shape[2] > _FEW_COLUMNS and triangles.takes(p):
        triangles.turn(p, weights, out, take)
        return
    if p.data_ptr() != out.data_ptr():
        multiply(p, weights.mT, out)
        return
    # A few at a time, so that what is copied back is still in the cache.
    few = max(1, _FEW_VALUES * len(p) // p.numel())
    pieces = [(p, weights)] if few >= len(p) else zip(p.split(few), weights.split(few), strict=True)
    for some, weight in pieces:
        some.copy_(multiply(some, weight.mT, take("turned", some.shape, torch.float32)))


def _weights(p: Tensor, take: Take) -> tuple[Tensor, list[float]]:
    """For a batch of A (B, n, r) the W D of the module's docstring, and how much W amplifies a Gram matrix's error."""
    batch, _, r = p.shape
    product = take("gram32", (batch, r, r), torch.float32)
    if r > _FEW_COLUMNS and triangles.takes(p):
        triangles.gram(p, product, take)
    else:
        multiply(p.mT, p, product)
    weights = take("weights", (batch, r, r), torch.float32)
    if r <= _FEW_COLUMNS:
        return _weights_of_few(product, weights)
    lengths = product.diagonal(dim1=-2, dim2=-1).contiguous()  # squared
    fits = (lengths > _LENGTHS[0]).logical_and_(lengths < _LENGTHS[1]).all(-1)
    identity = take("identity", (_LEAF, _LEAF), torch.float32).zero_()
    identity.diagonal().fill_(1.0)
    fits.logical_and_(_invert_factor(product, weights.zero_(), identity))
    # Cholesky's rounding does not depend on the columns' lengths, so W D is the inverse of A^T A's own factor, and the
    # squared lengths of W's rows are those of W D with every entry scaled back.
    squares = torch.mul(weights, weights, out=product)
    amplification = torch.bmm(squares, lengths.unsqueeze(-1)).amax((-2, -1))
    amplification.masked_fill_(fits.logical_not_(), torch.nan)
    return weights, amplification.tolist()


def _weights_of_few(grams: Tensor, weights: Tensor) -> tuple[Tensor, list[float]]:
    """`_weights` from the Gram matrices (B, r, r), where r is so small that a call costs more than what it does.

    NumPy's own arrays are r x r.
    """
    amplification: list[float] = []
    for exact, weight in zip(grams.numpy(), weights.numpy(), strict=True):
        lengths = exact.diagonal().astype(np.float64)
        each = lengths.tolist()
        # A NaN that these two do not see reaches `inverse`, if the factorisation does not refuse it.
        if not (min(each) > _LENGTHS[0] and max(each) < _LENGTHS[1]):
            amplification.append(np.nan)
            continue
        scale = lengths**-0.5
        product = exact * scale
        product *= scale[:, None]
        try:
            inverse = np.linalg.inv(np.linalg.cholesky(product))
        except np.linalg.LinAlgError:
            amplification.append(np.nan)
            continue
        amplification.append(float(np.square(inverse).sum(-1).max()))
        np.multiply(inverse, scale, out=weight, casting="same_kind")
    return weights, amplification


def _invert_factor(g: Tensor, inverse: Tensor, identity: Tensor) -> Tensor:
    """inverse = L^-1 where G = L L^T, (B, r, r), lower triangular; G is overwritten, `inverse` was zero.

    By halves, so that all but the smallest factors are batched products.

    Returns:
        (B,), bool: which G are positive definite. The others' `inverse` is no such thing.
    """
    r = g.shape[-1]
    if r <= _LEAF:
        lower, broken = torch.linalg.cholesky_ex(g)
        inverse.copy_(torch.linalg.solve_triangular(lower, identity[:r, :r].expand_as(lower), upper=False))
        return broken == 0
    half = -(-r // (2 * _LEAF)) * _LEAF
    first, last = slice(None, half), slice(half, None)
    definite = _invert_factor(g[:, first, first], inverse[:, first, first], identity)
    corner = inverse[:, first, first]
    below = torch.bmm(g[:, last, first], corner.mT)  # of L
    g[:, last, last].sub_(torch.bmm(below, below.mT))
    definite.logical_and_(_invert_factor(g[:, last, last], inverse[:, last, last], identity))
    torch.neg(torch.bmm(torch.bmm(inverse[:, last, last], below), corner), out=inverse[:, last, first])
    return definite
