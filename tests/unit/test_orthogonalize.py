"""Gram-Schmidt and Cholesky QR: orthonormal bases of the input's columns, whatever the input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from optimus_cc_ext.compressors import orthogonalize as module
from optimus_cc_ext.compressors.orthogonalize import begins_in_fp32, cholesky_qr, cholesky_qr_all, gram_schmidt
from optimus_cc_ext.compressors.scratch import Scratch
from tests.allocations import Watch
from tests.low_rank_steps import EPS32, gaussian, with_spectrum

# Stored in fp32, every entry of orthonormal columns is off by eps/2, and P^T P by less than eps.
ROUNDING = 2 * EPS32
# For large well-conditioned matrices, the sums of the Gram matrix round this much in fp32 on a CPU.
IN_FP32 = 12 * EPS32
BASES = pytest.mark.parametrize("orthogonalize", [cholesky_qr, gram_schmidt])


def rounding_of(p: Tensor) -> float:
    """Return the error that a basis of p may have: larger if p is large enough for fp32."""
    return IN_FP32 if begins_in_fp32(p) else ROUNDING


def off_orthonormal(p: Tensor) -> float:
    p = p.double()
    return (p.mT @ p - torch.eye(p.shape[-1], dtype=torch.float64)).abs().max().item()


def left_outside(a: Tensor, p: Tensor) -> float:
    """Return the largest share of a matrix of `a` (Frobenius norm) that its basis in `p` does not span."""
    a, p = a.double(), p.double()
    a = a / a.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
    missed = torch.linalg.matrix_norm(a - p @ (p.mT @ a))
    return (missed / torch.linalg.matrix_norm(a).clamp_min(1e-300)).max().item()


@pytest.mark.parametrize("n, r", [(1, 1), (64, 1), (7, 7), (64, 16), (300, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_both_return_the_same_basis_of_a_well_conditioned_matrix(n: int, r: int, dtype: torch.dtype) -> None:
    p = gaussian(3, n, r, dtype=dtype) + 3 * torch.eye(n, r, dtype=dtype)
    oracle = gram_schmidt(p.double())
    # Cholesky QR's error is the rounding to fp32 of entries up to 1; in fp64 it is the shift of 16 n eps.
    # Gram-Schmidt's is about the matrix's condition (below 100 here) times the eps of the arithmetic.
    eps = torch.finfo(torch.float64).eps if dtype == torch.float64 else EPS32
    rounding = 16 * n * eps if dtype == torch.float64 else rounding_of(p) / 2
    torch.testing.assert_close(cholesky_qr(p).double(), oracle, rtol=0, atol=rounding)
    torch.testing.assert_close(gram_schmidt(p).double(), oracle, rtol=0, atol=400 * eps)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert cholesky_qr(p).dtype == gram_schmidt(p).dtype == wide


def test_batches_of_different_shapes_share_a_factorisation_and_come_out_as_alone() -> None:
    shapes = [(2, 30, 4), (1, 7, 4), (3, 40, 9), (2, 4, 4), (1, 600, 128)]
    ps = [gaussian(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    ps[1][0, 3, 1] = torch.nan
    outs = [torch.empty_like(p) for p in ps]
    with Watch() as watch:
        cholesky_qr_all(ps, outs, Scratch())
    for p, out in zip(ps, outs, strict=True):
        assert torch.equal(out.nan_to_num(7), cholesky_qr(p).nan_to_num(7))
    # Three groups have two passes each: r = 4, r = 9, and the batch that is large enough for fp32.
    assert watch.count("cholesky") == 6


@pytest.mark.parametrize("r", [1, 2, 3, 16])
def test_agrees_with_the_orthogonalisation_of_pytorchs_powersgd_hook(r: int) -> None:
    p = gaussian(4, 200, r)
    theirs = p.clone()
    powerSGD_hook._orthogonalize(theirs)
    # LAPACK's QR leaves the sign of each column open, so the test compares the projectors. Both are fp32.
    projector, expected = (q @ q.mT for q in (cholesky_qr(p), theirs))
    torch.testing.assert_close(projector, expected, rtol=0, atol=10 * EPS32)


@pytest.mark.parametrize("n, r", [(64, 64), (128, 64), (96, 96), (512, 128)])
@pytest.mark.parametrize("smallest_exponent", [0, -3, -6, -7])
def test_decaying_spectra_at_full_rank_give_an_orthonormal_basis(n: int, r: int, smallest_exponent: float) -> None:
    p = with_spectrum(n, r, smallest_exponent, batch=3)
    basis = cholesky_qr(p)
    assert off_orthonormal(basis) < rounding_of(p)
    assert left_outside(p, basis) < rounding_of(p)


def test_columns_of_very_different_lengths_cost_nothing() -> None:
    p = gaussian(2, 64, 12) * torch.logspace(-30, 30, 12)
    torch.testing.assert_close(cholesky_qr(p), cholesky_qr(gaussian(2, 64, 12)), rtol=0, atol=4 * EPS32)


@pytest.mark.parametrize("scale", [1e-40, 1e-38, 1e-20, 1e15, 1e37])
@BASES
def test_scale_of_the_input_does_not_matter(orthogonalize, scale: float) -> None:
    p = gaussian(2, 50, 8)
    # A subnormal number such as 1e-40 has only 5 digits.
    tolerance = 1e-3 if scale < 1e-38 else 2e-6
    torch.testing.assert_close(orthogonalize(p * scale), orthogonalize(p), rtol=0, atol=tolerance)


def zeroed(p: Tensor, index: object) -> Tensor:
    p[index] = 0
    return p


DEGENERATE = {
    "zero": lambda p, n, r: p.zero_(),
    "zero column": lambda p, n, r: zeroed(p, (..., r // 2)),
    "equal columns": lambda p, n, r: p.fill_(1.0),
    "second half repeats the first": lambda p, n, r: torch.cat([p[..., : r - r // 2], p[..., : r // 2]], dim=-1),
    "rank 2": lambda p, n, r: p[..., :2] @ gaussian(2, 2, r, seed=5),
    "small integers of rank 3": lambda p, n, r: p[..., :3].round() @ gaussian(2, 3, r, seed=5).round(),
    "one zero matrix among others": lambda p, n, r: zeroed(p, 0),
    "singular values down to 1e-30": lambda p, n, r: with_spectrum(n, r, -30),
    "powers of one vector": lambda p, n, r: (torch.linspace(0, 1, n)[:, None] ** torch.arange(r)).expand(2, n, r),
}


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize(
    "n, r", [(8, 8), (40, 16), (128, 128), (1536, 128), pytest.param(700, 600, marks=pytest.mark.full)]
)
def test_zero_and_rank_deficient_input_give_a_finite_contraction_that_spans_the_input(
    kind: str, n: int, r: int
) -> None:
    p = DEGENERATE[kind](gaussian(2, n, r), n, r)
    basis = cholesky_qr(p)
    assert basis.isfinite().all()
    # P P^T must never amplify, because that would make error feedback's residual grow without bound.
    assert torch.linalg.matrix_norm(basis.double(), ord=2).max() < 1 + rounding_of(p)
    assert left_outside(p, basis) < 10 * ROUNDING


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 5])
def test_one_bad_entry_makes_its_matrix_all_nan_and_leaves_its_neighbours_alone(bad: float, column: int) -> None:
    p = gaussian(3, 20, 6)
    expected = cholesky_qr(p)
    p[1, 7, column] = bad
    basis = cholesky_qr(p)
    assert basis[1].isnan().all()
    assert torch.equal(basis[[0, 2]], expected[[0, 2]])
    assert gram_schmidt(p)[1].isnan().any()


def test_never_asks_for_a_value() -> None:
    # A meta tensor has no values: `.item()`, `if tensor` and a checked factorisation raise on it.
    assert cholesky_qr(torch.empty(3, 20, 6, device="meta")).shape == (3, 20, 6)


def test_number_of_operations_grows_neither_with_columns_nor_with_matrices() -> None:
    def calls(batch: int, r: int) -> int:
        with Watch() as watch:
            cholesky_qr(gaussian(batch, 80, r))
        return watch.calls

    assert calls(1, 2) == calls(1, 32) == calls(9, 2)


@BASES
def test_a_zero_column_stays_zero_and_the_input_as_it_was(orthogonalize) -> None:
    p = zeroed(gaussian(1, 20, 4), (..., 2))
    before = p.clone()
    basis = orthogonalize(p)
    assert torch.equal(p, before)
    assert (basis[..., 2] == 0).all()
    assert off_orthonormal(basis[..., [0, 1, 3]]) < 1e-6


@BASES
def test_more_columns_than_rows_are_refused_with_the_cure(orthogonalize) -> None:
    with pytest.raises(ValueError, match=r"5 columns of 4 rows.*effective_rank"):
        orthogonalize(torch.ones(1, 4, 5))
    with pytest.raises(ValueError, match="batch of matrices"):
        orthogonalize(torch.ones(4, 3))


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(0, 4),
    n=st.integers(1, 48),
    r=st.integers(1, 48),
    true_rank=st.integers(0, 48),
    exponent=st.floats(-30, 30),
    seed=st.integers(0, 2**31),
)
def test_any_shape_rank_and_scale_gives_a_finite_contraction_that_spans_the_input(
    batch: int, n: int, r: int, true_rank: int, exponent: float, seed: int
) -> None:
    r = min(n, r)
    low_rank = gaussian(batch, n, true_rank, seed=seed) @ gaussian(batch, true_rank, r, seed=seed + 1)
    p = low_rank * 10**exponent
    basis = cholesky_qr(p)
    assert basis.shape == p.shape
    assert basis.isfinite().all()
    if batch:
        assert torch.linalg.matrix_norm(basis.double(), ord=2).max() < 1 + ROUNDING
        assert left_outside(p, basis) < 10 * ROUNDING


# --- large matrices on a CPU: fp32 where it is enough --------------------------------------------------------


def of_condition(condition: float, batch: int = 1) -> Tensor:
    """Make (batch, 640, 128) in fp32 of this condition, in directions that are not single columns."""
    return with_spectrum(640, 128, -math.log10(condition), batch=batch)


@pytest.fixture
def in_fp64(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that is filled, call by call, with the number of matrices that are orthogonalised in fp64."""
    seen: list[int] = []
    two_passes = module._two_passes

    def counted(ps: list[Tensor], outs: list[Tensor], dtype: torch.dtype, scratch: Scratch) -> Tensor:
        seen.extend([len(p) for p in ps] * (dtype == torch.float64))
        return two_passes(ps, outs, dtype, scratch)

    monkeypatch.setattr(module, "_two_passes", counted)
    return seen


@pytest.mark.parametrize("condition", [1.0, 3.0, 30.0, 1e3, 1e6])
def test_the_condition_decides_in_what_a_matrix_is_orthogonalised(condition: float, in_fp64: list[int]) -> None:
    fails = condition > 100
    p = of_condition(condition)
    basis = cholesky_qr(p)
    assert in_fp64 == [1] * fails
    assert off_orthonormal(basis) < (ROUNDING if fails else IN_FP32)
    assert left_outside(p, basis) < IN_FP32
    # The basis equals the one in fp64, except that fp32's rounding of P turns it by eps times P's condition.
    expected = cholesky_qr(p.double()).float()
    torch.testing.assert_close(basis, expected, rtol=0, atol=max(IN_FP32, 4 * EPS32 * condition))


def test_a_warm_started_projection_needs_no_fp64(in_fp64: list[int]) -> None:
    # The singular values fall tenfold over the kept directions, and Q is aligned with these directions up to noise.
    left, right = (torch.linalg.qr(gaussian(1, rows, 128, seed=rows)).Q for rows in (640, 300))
    falling = torch.logspace(0, -1, 128)
    matrix = (left * falling) @ right.mT + 1e-3 * gaussian(1, 640, 300, seed=5)
    q = torch.linalg.qr(right + 1e-3 * gaussian(1, 300, 128, seed=6)).Q
    assert off_orthonormal(cholesky_qr(matrix @ q)) < IN_FP32
    assert in_fp64 == []


@pytest.mark.parametrize("scale", [4e-21, 1e-17, 1e16, 1e21])
def test_lengths_whose_squares_fp32_cannot_hold_cost_no_accuracy(scale: float) -> None:
    # Products of entries of 4e-21 keep four digits in fp32, as all numbers near 1e-41 do.
    p = gaussian(1, 640, 128) * scale
    assert off_orthonormal(cholesky_qr(p)) < IN_FP32


def test_every_matrix_of_a_batch_is_treated_as_if_it_were_alone(in_fp64: list[int]) -> None:
    kinds = [of_condition(c)[0] for c in (1.0, 30.0, 1e5)]
    kinds += [gaussian(640, 128) * 1e-25, torch.zeros(640, 128), torch.full((640, 128), torch.nan), gaussian(640, 128)]
    p = torch.stack(kinds)
    p[6, 3, 7] = torch.inf
    p[4, :, 5] = 1.0
    together = cholesky_qr(p)
    assert len(in_fp64) == 5
    for index in range(len(p)):
        torch.testing.assert_close(
            together[index], cholesky_qr(p[index : index + 1])[0], rtol=0, atol=0, equal_nan=True
        )
    assert together[5:].isnan().all() and together[:5].isfinite().all()
    assert off_orthonormal(together[:4]) < IN_FP32
    assert (together[4, :, :5] == 0).all() and (together[4, :, 6:] == 0).all()
    assert cholesky_qr(p, out=p) is p
    torch.testing.assert_close(p, together, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wide", [gaussian(2, 30, 5), of_condition(3.0, batch=2)], ids=["small", "large"])
def test_sixteen_bits_strides_any_out_and_the_input_itself_come_out_alike(wide: Tensor) -> None:
    p = wide.bfloat16()
    expected = cholesky_qr(p.float())
    assert torch.equal(cholesky_qr(p), expected)
    assert torch.equal(cholesky_qr(p.mT.contiguous().mT), expected)
    strided = torch.empty(*p.shape[:2], 2 * p.shape[2])[..., ::2]
    assert torch.equal(cholesky_qr(p, out=strided), expected)
    over = p.float()
    assert cholesky_qr(over, out=over) is over and torch.equal(over, expected)
    assert torch.equal(cholesky_qr(p, out=p), expected.bfloat16())
