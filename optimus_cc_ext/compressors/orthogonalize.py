"""Orthonormal bases of the columns of a batch of matrices: Gram-Schmidt (the oracle) and a fast Cholesky QR.

Both return the Q of a QR decomposition whose R has a positive diagonal, so on well-conditioned input they agree element
by element. A column that is exactly zero stays zero in both.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from optimus_cc_ext.compressors.scratch import Scratch

_FEWEST_FLOPS_FOR_FP32 = 1 << 23
"""Operations of one matrix's Gram matrix on a CPU below which fp64 is as fast as fp32."""

_NEARLY_ORTHONORMAL = 1e-3
"""Largest |A^T A - 1| of a basis A after a first pass in fp32 from which a second pass reaches fp32's rounding."""


@torch.no_grad()
def gram_schmidt(p: Tensor) -> Tensor:
    """Orthonormalise by modified Gram-Schmidt, column by column: `ORTHOGONALIZE` in PowerSGD's algorithm 1.

    Args:
        p: (B, n, r), r <= n; any floating dtype.

    Returns:
        (B, n, r) in float32 (float64 for float64 input). A column that depends on earlier ones comes out as
        normalised rounding noise. NaN or Inf in a matrix reaches its output as NaN.

    Raises:
        ValueError: if r > n or p is not a batch of matrices.
    """
    _check(p)
    basis = p.to(_at_least_fp32(p), copy=True)
    for matrix in basis:
        for j in range(matrix.shape[1]):
            column, rest = matrix[:, j : j + 1], matrix[:, j + 1 :]
            # Divided by its largest entry first, because squares of entries such as 1e-25 or 1e+25 leave fp32's range.
            largest = column.abs().max()
            if largest != 0:
                column /= largest
                column /= torch.linalg.vector_norm(column)
            rest -= column @ (column.T @ rest)
    return basis


@torch.no_grad()
def cholesky_qr(p: Tensor, out: Tensor | None = None, scratch: Scratch | None = None) -> Tensor:
    """Do a shifted Cholesky QR, twice: batched products and r x r factors, no loop over columns or matrices.

        1. G = A^T A, plus a shift of 16 n eps of each column's squared length
        2. G = L L^T
        3. A <- A L^-T
        4. 1 to 3 again

    The passes run in fp64. A Gram matrix squares the condition number, so that in fp32 its rounding hides every
    direction below 3e-4 of the largest, and with the shift that keeps Cholesky alive, three passes would be needed. In
    fp64 two passes reach fp32's own rounding on everything that fp32 can represent, squares neither underflow nor
    overflow, and neither TF32 nor autocast changes the products. The host never waits for a value from the device.

    On a CPU fp64 is half as fast, but reading a value is free. So large matrices go through fp32 first, without a
    shift; matrices that are not nearly orthonormal after the first pass (ill-conditioned ones, empty columns, squares
    outside of fp32's range, NaN) go through fp64. In fp32, products have the precision that the user allows torch.

    Args:
        p: (B, n, r), r <= n; any floating dtype (in float64 only magnitudes between 1e-150 and 1e+150).
        out: where to write the result, (B, n, r) of any floating dtype; may be `p` itself.
        scratch: keeps the intermediate tensors between calls; with it and `out`, nothing is allocated.

    Returns:
        `out`, or (B, n, r) in float32 (float64 for float64 input). Columns are orthonormal to rounding, or to 2e-6 if
            fp32 was enough. A column with no direction of its own (zero, or exactly dependent on others) may be
            shorter, down to zero. A matrix with a NaN or Inf anywhere becomes all NaN; its neighbours in the batch are
            untouched.

    Raises:
        ValueError: if r > n or p is not a batch of matrices.

    Source: Fukaya et al. 2020, "Shifted Cholesky QR for computing the QR factorization of ill-conditioned matrices".
    """
    out = torch.empty_like(p, dtype=_at_least_fp32(p), memory_format=torch.contiguous_format) if out is None else out
    cholesky_qr_all([p], [out], scratch)
    return out


@torch.no_grad()
def cholesky_qr_all(ps: Sequence[Tensor], outs: Sequence[Tensor], scratch: Scratch | None = None) -> None:
    """Apply `cholesky_qr` to several batches at once, whose n may differ, and whose r may form several groups.

    All batches of one r share the factorisations: on a GPU a batch of r x r matrices takes about as long as one matrix.
    """
    scratch = scratch or Scratch()
    alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, p in enumerate(ps):
        _check(p)
        alike[p.shape[2], begins_in_fp32(p)].append(index)
    for (_, in_fp32), indices in alike.items():
        some, into = [ps[index] for index in indices], [outs[index] for index in indices]
        if in_fp32:
            for p, out in zip(some, into, strict=True):
                _in_fp32_first(p, out, scratch)
        else:
            _two_passes(some, into, torch.float64, scratch)


def _in_fp32_first(p: Tensor, out: Tensor, scratch: Scratch) -> None:
    basis = scratch.take("basis in fp32", p.shape, torch.float32, p.device)
    gram = _two_passes([p], [basis], torch.float32, scratch)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    off = scratch.take("off", gram.shape[:1], torch.float32, p.device)
    for index, distance in enumerate(torch.linalg.vector_norm(gram, dim=(-2, -1), out=off).tolist()):
        if not distance <= _NEARLY_ORTHONORMAL:  # `not <=` is also true for NaN
            one = slice(index, index + 1)
            _two_passes([p[one]], [basis[one]], torch.float64, scratch)
    out.copy_(basis)


def begins_in_fp32(p: Tensor) -> bool:
    """Return whether the basis of p (B, n, r) is sought in fp32 first, on a CPU; shape and dtype alone decide."""
    _, n, r = p.shape
    return p.device.type == "cpu" and p.dtype != torch.float64 and 2 * n * r * r >= _FEWEST_FLOPS_FOR_FP32


def _two_passes(ps: Sequence[Tensor], outs: Sequence[Tensor], dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """Run steps 1 to 4 in `dtype` on (B, n, r) of one r: in fp64, or in fp32 without a shift; return the second pass's
    G.

    A = P L^-T is computed again in each place that needs it, so that the memory holds the largest P, and not all of
    them.
    """
    sizes, r, device = [p.shape[0] for p in ps], ps[0].shape[2], ps[0].device
    take = partial(scratch.take, dtype=dtype, device=device)
    identity = take("identity", (r, r)).zero_()
    identity.diagonal().fill_(1.0)
    shape = (sum(sizes), r, r)
    gram, first, second = take("gram", shape), take("first", shape), take("second", shape)
    grams, firsts, seconds = gram.split(sizes), first.split(sizes), second.split(sizes)
    for p, its_gram in zip(ps, grams, strict=True):
        _write_gram(_times(p, (), dtype, scratch), its_gram, scratch)
    _write_inverse_factors(gram, identity, first, scratch)
    for p, its_gram, its_first in zip(ps, grams, firsts, strict=True):
        _write_gram(_times(p, (its_first,), dtype, scratch), its_gram, scratch)
    _write_inverse_factors(gram, identity, second, scratch)
    for p, out, its_first, its_second in zip(ps, outs, firsts, seconds, strict=True):
        out.copy_(_times(p, (its_first, its_second), dtype, scratch))
    return gram


def _times(p: Tensor, inverses: tuple[Tensor, ...], dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """Return P times the transpose of each matrix in `inverses`, in `dtype`."""
    a = p if p.dtype == dtype else scratch.take("wide", p.shape, dtype, p.device).copy_(p)
    for number, inverse in enumerate(inverses):
        # A NaN or Inf fills its row with NaN in the first pass (0 * NaN is NaN), and the whole matrix in the second.
        a = torch.bmm(a, inverse.mT, out=scratch.take(f"times {number}", p.shape, dtype, p.device))
    return a


def _write_gram(a: Tensor, out: Tensor, scratch: Scratch) -> None:
    """Write the Gram matrix G = A^T A, in fp64 with its shift; A (B, n, r), G (B, r, r)."""
    torch.bmm(a.mT, a, out=out)
    if a.dtype == torch.float64:
        # The shift is well above the rounding of G, so that Cholesky does not break down, and small enough for two
        # passes: a direction at fp32's noise, 1e-7 of its columns, leaves the first one at 1e-2 and the second at 1. It
        # is relative to each column, so that very different lengths, as an aligned Q gives to P = M Q, cost no
        # accuracy. An empty column gets a length of 1, so that Cholesky does not divide by zero.
        lengths = out.diagonal(dim1=-2, dim2=-1)  # squared lengths of the columns, a view of G
        empty = torch.eq(lengths, 0.0, out=scratch.take("empty", lengths.shape, a.dtype, a.device))
        lengths.mul_(1.0 + 16 * a.shape[1] * torch.finfo(a.dtype).eps).add_(empty)


def _write_inverse_factors(gram: Tensor, identity: Tensor, out: Tensor, scratch: Scratch) -> None:
    """Write the inverse of G's Cholesky factor L (G = L L^T), (B, r, r)."""
    lower = scratch.take("lower", gram.shape, gram.dtype, gram.device)
    broken = scratch.take("broken", gram.shape[:1], torch.int32, gram.device)
    torch.linalg.cholesky_ex(gram, out=(lower, broken))
    torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False, out=out)


def _check(p: Tensor) -> None:
    if p.dim() != 3:
        raise ValueError(f"expected a batch of matrices (B, n, r), got shape {tuple(p.shape)}")
    if p.shape[1] < p.shape[2]:
        raise ValueError(
            f"cannot orthogonalise {p.shape[2]} columns of {p.shape[1]} rows: take the rank from effective_rank"
        )


def _at_least_fp32(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
