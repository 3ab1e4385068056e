"""Orthonormal bases of the columns of a batch of matrices: Gram-Schmidt (the oracle) and a fast Cholesky QR.

Both return the Q of a QR decomposition whose R has a positive diagonal, so on well-conditioned input they
agree element by element. A column that is exactly zero stays zero in both.
"""

from functools import partial

import torch
from torch import Tensor

from optimus_cc_ext.compressors.gradless import gradless
from optimus_cc_ext.compressors.orthogonalize_fp32 import is_for_fp32, orthonormalize_fp32
from optimus_cc_ext.compressors.scratch import Scratch

__all__ = ["cholesky_qr", "cholesky_qr_into", "gram_schmidt"]

_AMPLIFIED_TO_NOTHING = 100.0
"""Condition squared up to which a pass in fp64 is enough: 100 times a shift of 1e-11."""


@gradless
def gram_schmidt(p: Tensor) -> Tensor:
    """Modified Gram-Schmidt, column by column, matrix by matrix: `ORTHOGONALIZE` in PowerSGD's algorithm 1.

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
            # Scaled by its largest entry first: the squares of 1e-25 and of 1e+25 leave fp32.
            largest = column.abs().max()
            if largest != 0:
                column /= largest
                column /= torch.linalg.vector_norm(column)
            rest -= column @ (column.T @ rest)
    return basis


@gradless
def cholesky_qr(p: Tensor, out: Tensor | None = None, scratch: Scratch | None = None) -> Tensor:
    """Shifted Cholesky QR, twice, in float64: G = A^T A + shift, G = L L^T, A <- A L^-T.

    Batched products, r x r Cholesky factors and r x r triangular inverses: no loop over columns or
    matrices, no branch on values, no host synchronisation. All but small matrices on a CPU, where a branch on a
    value is free and float64 is a quarter as fast, go through `orthonormalize_fp32` first: one pass in
    float32 where the matrix is well-conditioned, and float64 for those matrices only that it is not enough for.

    Compared on one Gaussian matrix of 3072 x 128 out of a batch of 18, on two cores of a Zen 5, and by how much
    the result is off orthonormal (`scripts/bench/compressors.py --only orthogonalization` measures it again):

        LAPACK's QR, which PyTorch's hook calls     3.5 ms                        9e-7   any condition
        CholeskyQR2 in float64, this one            5.2 ms                        4e-9   any condition; no host read
        one pass in float32                         0.6 ms for its two products   6e-7   condition below about 10

    On a GPU there is float64 only: asking whether float32 would do means waiting for the device.

    Why float64 inside: a Gram matrix squares the condition number. In float32 its rounding hides every
    direction below 3e-4 of the largest; the shift that keeps Cholesky alive then needs three passes, which
    still leave errors of 1e-5 on full-rank spectra that fall to 1e-6. In float64 two passes reach float32's
    own rounding on everything that float32 can represent, the squares of its whole range neither underflow
    nor overflow, and neither TF32 nor autocast gets at the products. Data-centre GPUs of the A100 and H100
    class multiply float64 at float32's rate; consumer GPUs do not.

    Args:
        p: (B, n, r), r <= n; any floating dtype (of float64 only what is between 1e-150 and 1e+150).
        out: where to write the result, (B, n, r) of any floating dtype; may be `p` itself.
        scratch: keeps the intermediate tensors between calls; with it and `out`, nothing is allocated, but on a
            CPU r x r matrices.

    Returns:
        `out`, or (B, n, r) in float32 (float64 for float64 input). Columns are orthonormal to rounding, or to
        2e-6 where a float32 pass was enough, except that one with no direction of its own (zero, or exactly
        dependent on others) may be shorter, down to zero. A matrix with a NaN or Inf anywhere comes out as
        all NaN; its neighbours in the batch are untouched.

    Raises:
        ValueError: if r > n or p is not a batch of matrices.

    Source: Fukaya et al. 2020, "Shifted Cholesky QR for computing the QR factorization of ill-conditioned
    matrices".
    """
    return cholesky_qr_into(p, out, scratch)[0]


def cholesky_qr_into(p: Tensor, out: Tensor | None, scratch: Scratch | None) -> tuple[Tensor, bool]:
    """`cholesky_qr`; and whether it is known, from what has been computed anyway, that no column is zero or NaN."""
    _check(p)
    scratch = scratch or Scratch()
    if not is_for_fp32(p):
        return _two_passes(p, out, scratch), False
    take = partial(scratch.take, device=p.device)
    single = p if p.dtype == torch.float32 and p.is_contiguous() else take("single", p.shape, torch.float32).copy_(p)
    direct = out is not None and out.dtype == torch.float32 and out.is_contiguous()
    basis = out if out is not None and direct else take("basis32", p.shape, torch.float32)
    too_hard = orthonormalize_fp32(single, basis, take)
    for index in too_hard:
        one = basis[index : index + 1]
        _two_passes(one, one, scratch)
    if out is None:
        return basis.clone(), not too_hard
    return out if direct else out.copy_(basis), not too_hard


def _two_passes(p: Tensor, out: Tensor | None, scratch: Scratch) -> Tensor:
    """`cholesky_qr` in fp64: without a branch on values on a GPU; on a CPU one pass, where that is enough."""
    batch, n, r = p.shape
    take = partial(scratch.take, dtype=torch.float64, device=p.device)
    # Well above the rounding of G, so that Cholesky does not break down, and small enough for two passes: a
    # direction at float32's noise, 1e-7 of its columns, leaves the first one at 1e-2 and the second at 1.
    relative_shift = 16 * n * torch.finfo(torch.float64).eps
    identity = take("identity", (r, r)).zero_()
    identity.diagonal().fill_(1.0)
    gram, lower, inverse = (take(name, (batch, r, r)) for name in ("gram", "lower", "inverse"))
    broken = scratch.take("broken", (batch,), torch.int32, p.device)
    basis, product = take("basis", (batch, n, r)), take("product", (batch, n, r))
    basis.copy_(p)
    for _ in range(2):
        torch.bmm(basis.mT, basis, out=gram)
        lengths = gram.diagonal(dim1=-2, dim2=-1)  # squared, of the columns; a view
        # Relative to each column: very different lengths, as an aligned Q gives to P = M Q, cost no accuracy.
        # An empty column gets a length of 1, so that Cholesky has something to stand on.
        empty = torch.eq(lengths, 0.0, out=take("empty", lengths.shape))
        lengths.mul_(1.0 + relative_shift).add_(empty)
        torch.linalg.cholesky_ex(gram, out=(lower, broken))
        torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False, out=inverse)
        # A NaN or Inf fills its row with NaN here (0 * NaN is one), and all the rest in the second pass.
        basis, product = torch.bmm(basis, inverse.mT, out=product), basis
        # The shift, and rounding, reach the result multiplied by the squared rows of L^-1, with columns of length 1. A
        # branch on values, for a CPU only; what was L is not needed any more.
        if p.device.type == "cpu":
            torch.mul(inverse, inverse, out=lower)
            amplified = torch.bmm(lower, lengths.unsqueeze(-1), out=take("amplified", (batch, r, 1)))
            if (amplified.numpy() < _AMPLIFIED_TO_NOTHING).all():  # NaN is not
                break
    return basis.to(_at_least_fp32(p)) if out is None else out.copy_(basis)


def _check(p: Tensor) -> None:
    if p.dim() != 3:
        raise ValueError(f"expected a batch of matrices (B, n, r), got shape {tuple(p.shape)}")
    if p.shape[1] < p.shape[2]:
        raise ValueError(
            f"cannot orthogonalise {p.shape[2]} columns of {p.shape[1]} rows: take the rank from policy.effective_rank"
        )


def _at_least_fp32(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
