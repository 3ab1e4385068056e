"""The low-rank step and its message, as CB and SC use them."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.low_rank import (
    FastLowRank,
    LowRank,
    PackedFactors,
    ReferenceLowRank,
    effective_rank,
    next_warm_start,
    packed_numel,
    pays,
)
from tests.low_rank_steps import BOTH, EPS32, first_q, gaussian, step, with_spectrum, worst_error

SMALL, LARGE = (2, 30, 40, 4), (2, 600, 2048, 16)
"""(batch, n, m, r) of small and of large matrices."""
SIZES = pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
WIRE = pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SUM_OF_2048 = 24 * EPS32
"""Error of an fp32 sum of 2048 products: rounding errors add up like a random walk, 45 steps of eps / 2."""


# --- policy -----------------------------------------------------------------------------------------------


@given(n=st.integers(1, 300), m=st.integers(1, 300), compression_rank=st.integers(1, 400))
@example(1, 4096, 16)
@example(4, 4, 2)  # the message has 2 * (4 + 4) = 16 values, as many as the matrix
@example(4, 5, 2)
def test_pays_exactly_where_the_message_is_smaller_than_the_matrix(n: int, m: int, compression_rank: int) -> None:
    r = effective_rank(n, m, compression_rank)
    assert r == min(n, m, compression_rank)
    message = PackedFactors(n, m, r, torch.float32)
    assert message.numel == packed_numel(n, m, r) == r * (n + m)
    assert pays(n, m, compression_rank) == (message.numel < n * m)


@pytest.mark.parametrize("n, m, compression_rank", [(0, 4, 1), (4, -1, 1), (4, 4, 0), (4, 4, -3)])
def test_sizes_and_ranks_that_are_not_positive_are_refused(n: int, m: int, compression_rank: int) -> None:
    with pytest.raises(ValueError, match=r"rows and columns|at least 1"):
        pays(n, m, compression_rank)


class _CublasPrecision(TorchDispatchMode):
    """Dispatch mode that notes the precision that cuBLAS may use, at each product of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.at_products: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(name in str(func) for name in ("aten.bmm", "aten.mm")) and args[0].dtype == torch.float32:
            self.at_products.append(torch.backends.cuda.matmul.fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("tf32_allowed")
def test_products_are_fp32_also_where_the_script_allows_tf32() -> None:
    codec, layout = fast_codec("int8", seed=1, rotated=True), BlockLayout.of_one(256)
    message = torch.empty(codec.message_bytes(layout, torch.float32), dtype=torch.uint8)
    with _CublasPrecision() as seen:
        p, q, _ = step(FastLowRank(), gaussian(2, 30, 40), first_q(2, 40, 4))
        FastLowRank().subtract_reconstruction(gaussian(2, 30, 40), p.bfloat16(), q.bfloat16())
        codec.encode(gaussian(256), layout, message)
        codec.decode(message, layout, torch.empty(256))
    assert len(seen.at_products) > 5 and "tf32" not in seen.at_products
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


# --- one step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, m, r", [(64, 128, 16), (128, 64, 16), (96, 96, 1), (40, 24, 24), (1, 30, 1), (30, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fast_compresses_like_the_reference_in_float64(n: int, m: int, r: int, dtype: torch.dtype) -> None:
    matrices, q = gaussian(3, n, m, dtype=dtype), first_q(3, m, r)
    p, q_new, approximation = step(FastLowRank(), matrices, q)
    expected_p, expected_q, expected = step(ReferenceLowRank(), matrices.double(), q.double())
    assert p.dtype == q_new.dtype == approximation.dtype == torch.float32
    # The tolerance is fp32 rounding, amplified by the condition of P = M Q: below 1e3 for the square case, below 10 for
    # most.
    tolerance = 1e3 * EPS32 if r == min(n, m) > 1 else 30 * EPS32
    torch.testing.assert_close((p @ p.mT).double(), expected_p @ expected_p.mT, rtol=0, atol=tolerance)
    assert worst_error(q_new, expected_q) < tolerance
    assert worst_error(approximation, expected) < tolerance


@BOTH
def test_a_matrix_of_rank_r_survives_one_cold_step(compressor: LowRank) -> None:
    matrices = gaussian(2, 64, 5) @ gaussian(2, 5, 100, seed=1)
    approximation = step(compressor, matrices, first_q(2, 100, 5))[2]
    # The tolerance is fp32 rounding, amplified by the condition of P = M Q.
    assert worst_error(approximation, matrices) < 1e-5


@BOTH
def test_warm_started_steps_converge_to_the_best_approximation(compressor: LowRank) -> None:
    matrices = with_spectrum(80, 60, -3, seed=3)
    r, q = 8, first_q(2, 60, 8)
    for _ in range(25):
        _, q_new, approximation = step(compressor, matrices, q)
        q = next_warm_start(q_new, first_q(2, 60, 8), compressor)
    best = torch.linalg.svdvals(matrices.double())[:, r:].square().sum(-1).sqrt()
    reached = torch.linalg.matrix_norm((approximation - matrices).double())
    assert (reached < 1.02 * best).all()  # `best` is the least possible error (Eckart and Young)


def worst_at_full_rank(*changing: Tensor) -> float:
    """Return the worst error of warm-started steps, one on each batch of matrices."""
    fast, (batch, n, m) = FastLowRank(), changing[0].shape
    q = fallback = first_q(batch, m, min(n, m))
    worst = 0.0
    for matrices in changing:
        _, q_new, approximation = step(fast, matrices, q)
        worst = max(worst, worst_error(approximation, matrices))
        q = next_warm_start(q_new, fallback, fast)
    return worst


@pytest.mark.parametrize("n, m", [(64, 128), (128, 64), (96, 96), (1024, 48), (1, 50), (50, 1)])
@pytest.mark.parametrize("smallest_exponent", [0, -3, -6, -9])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_full_rank_is_lossless_over_warm_started_steps_on_changing_matrices(
    n: int, m: int, smallest_exponent: float, scale: float
) -> None:
    # The error of two fp32 products of r terms each, without amplification, was measured as 2 to 8 eps.
    assert worst_at_full_rank(*(with_spectrum(n, m, smallest_exponent, seed=s) * scale for s in range(4))) < 1.5e-6


@pytest.mark.parametrize(
    "matrices",
    [gaussian(2, 64, 128), gaussian(2, 100, 3) @ gaussian(2, 3, 80), torch.ones(1, 32, 64)],
    ids=["gaussian", "rank 3", "rank 1"],
)
def test_full_rank_is_lossless_on_plain_gaussian_and_on_numerically_low_rank_matrices(matrices: Tensor) -> None:
    assert worst_at_full_rank(matrices, matrices, matrices) < 2e-6


@BOTH
def test_zero_matrices_give_finite_factors_and_a_zero_reconstruction(compressor: LowRank) -> None:
    p, q_new, approximation = step(compressor, torch.zeros(2, 30, 20), first_q(2, 20, 4))
    assert p.isfinite().all() and q_new.isfinite().all()
    assert (approximation == 0).all()


@BOTH
@SIZES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_entry_leaves_no_finite_one_of_its_matrix_and_all_of_the_others(
    compressor: LowRank, size, bad: float
) -> None:
    batch, n, m, r = size
    matrices, q = gaussian(batch, n, m), first_q(batch, m, r)
    clean = step(compressor, matrices, q)[2]
    matrices[1, n - 9, 5] = bad
    total, p = torch.empty_like(matrices), torch.empty(batch, n, r)
    compressor.project_sum(matrices, None, q, total=total, out=p)
    assert not p[1].isfinite().all()
    approximation = step(compressor, matrices, q)[2]
    arrives_bad = approximation[1].isnan()
    assert arrives_bad.all() if isinstance(compressor, FastLowRank) else arrives_bad.any()
    assert torch.equal(approximation[0], clean[0])


@BOTH
def test_every_phase_writes_into_out_even_where_it_requires_grad_or_holds_nan(compressor: LowRank) -> None:
    matrices, q = gaussian(2, 30, 20), first_q(2, 20, 4)
    p, q_new, approximation = step(compressor, matrices, q)

    def garbage(like: Tensor) -> Tensor:
        return torch.full_like(like, torch.nan).requires_grad_()

    for phase, arguments, expected in (
        (compressor.project, (matrices, q), compressor.project(matrices, q)),
        (compressor.orthogonalize, (compressor.project(matrices, q),), p),
        (compressor.back_project, (matrices, p), q_new),
        (compressor.reconstruct, (p, q_new), approximation),
    ):
        out = garbage(expected)
        assert phase(*arguments, out=out) is out
        assert torch.equal(out.detach(), expected)


@BOTH
def test_no_phase_changes_its_inputs_or_records_a_graph(compressor: LowRank) -> None:
    matrices, q = gaussian(2, 30, 20).requires_grad_(), first_q(2, 20, 4)
    results = step(compressor, matrices, q)
    assert not any(t.requires_grad for t in results)
    assert torch.equal(matrices.detach(), gaussian(2, 30, 20))
    assert torch.equal(q, first_q(2, 20, 4))


@BOTH
def test_transposed_and_strided_matrices_are_taken_as_they_are(compressor: LowRank) -> None:
    matrices, q = gaussian(2, 30, 20), first_q(2, 20, 4)
    strided = gaussian(2, 60, 40).new_zeros(2, 60, 40)[:, ::2, ::2]
    strided.copy_(matrices)
    expected = step(compressor, matrices, q)[2]
    for view in (matrices.mT.contiguous().mT, strided):
        # Another memory order may change the order of summation.
        assert worst_error(step(compressor, view, q)[2], expected) < 20 * EPS32


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 4),
    n=st.integers(1, 40),
    m=st.integers(1, 40),
    compression_rank=st.integers(1, 48),
    true_rank=st.integers(0, 40),
    exponent=st.floats(-20, 15),
    seed=st.integers(0, 2**31),
)
def test_fast_is_as_close_as_the_float64_reference_at_any_shape_rank_and_scale(
    batch: int, n: int, m: int, compression_rank: int, true_rank: int, exponent: float, seed: int
) -> None:
    r = effective_rank(n, m, compression_rank)
    matrices = gaussian(batch, n, true_rank, seed=seed) @ gaussian(batch, true_rank, m, seed=seed + 1)
    matrices *= 10**exponent
    q = first_q(batch, m, r, seed)

    def distance(approximation: Tensor) -> Tensor:
        return torch.linalg.matrix_norm((approximation.double() - matrices.double()) * 10**-exponent)

    _, _, approximation = step(FastLowRank(), matrices, q)
    _, _, expected = step(ReferenceLowRank(), matrices.double(), q.double())
    # fp32 turns the span of P = M Q by eps |M| / (the smallest singular value of P that M's rank allows). In any
    # compressor this angle is large if the first Q is nearly orthogonal to a strong direction of M.
    weakest = torch.linalg.svdvals(matrices.double() @ q.double())[:, max(0, min(r, true_rank) - 1)]
    condition = torch.linalg.matrix_norm(matrices.double(), ord=2) / weakest.clamp_min(1e-300)
    size = torch.linalg.matrix_norm(matrices.double() * 10**-exponent)
    assert (distance(approximation) <= distance(expected) + (2e-6 + EPS32 * condition) * size).all()


# --- sums, and what is left out ---------------------------------------------------------------------------


def as_in_a_bucket(matrices: Tensor) -> Tensor:
    """Return the same values with other parameters between them: contiguous rows, a batch that is strided."""
    batch, n, m = matrices.shape
    view = matrices.new_full((batch, n * m + 7), torch.nan)[:, : n * m].view(batch, n, m)
    return view.copy_(matrices)


@BOTH
@SIZES
@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_projected_as_in_float64(compressor: LowRank, size, residual_dtype, dtype) -> None:
    batch, n, m, r = size
    matrices, q = as_in_a_bucket(gaussian(batch, n, m, dtype=dtype)), first_q(batch, m, r)
    residual = None if residual_dtype is None else gaussian(batch, n, m, seed=1, dtype=residual_dtype)
    total, p = torch.full((batch, n, m), torch.nan), torch.full((batch, n, r), torch.nan)
    compressor.project_sum(matrices, residual, q, total=total, out=p)
    exact = matrices.double() + (0 if residual is None else residual.double())
    # The error, relative to the largest entry, is one rounding of the sum.
    assert worst_error(total, exact) <= EPS32 / 2
    assert worst_error(p, exact @ q.double()) < SUM_OF_2048


@BOTH
def test_the_sum_may_be_written_over_the_residual_and_p_may_be_rounded(compressor: LowRank) -> None:
    batch, n, m, r = LARGE
    matrices, residual, q = gaussian(batch, n, m), gaussian(batch, n, m, seed=1), first_q(batch, m, r)
    total, p = torch.empty_like(residual), torch.empty(batch, n, r)
    compressor.project_sum(matrices, residual, q, total=total, out=p)
    for dtype in (torch.float32, torch.bfloat16):
        over, again = residual.clone(), torch.full((batch, n, r), torch.nan, dtype=dtype)
        compressor.project_sum(matrices, over, q, total=over, out=again)
        assert torch.equal(over, total) and torch.equal(again, p.to(dtype))


@BOTH
@SIZES
@WIRE
def test_matrices_in_a_bucket_are_multiplied_as_in_float64(compressor: LowRank, size, wire: torch.dtype) -> None:
    batch, n, m, r = size
    matrices, q = as_in_a_bucket(gaussian(batch, n, m, dtype=wire)), first_q(batch, m, r)
    p = compressor.project(matrices, q)
    assert worst_error(p, matrices.double() @ q.double()) < SUM_OF_2048
    back = compressor.back_project(matrices, p)
    assert worst_error(back, matrices.double().mT @ p.double()) < SUM_OF_2048
    left = gaussian(batch, n, m, seed=3)
    exact = left.double() - 0.25 * p.double() @ back.double().mT
    compressor.subtract_reconstruction(left, p, back, share=0.25)
    assert worst_error(left, exact) < 4 * EPS32


@BOTH
@SIZES
@WIRE
def test_what_is_subtracted_is_what_the_other_end_rebuilds(compressor: LowRank, size, wire: torch.dtype) -> None:
    batch, n, m, r = size
    total = gaussian(batch, n, m)
    p, q = gaussian(batch, n, r, seed=1, dtype=wire), gaussian(batch, m, r, seed=2, dtype=wire)
    # The receiver's factors have another address and alignment, and it writes into a buffer that requires grad.
    p_read, q_read = (torch.empty(f.numel() + 1, dtype=wire)[1:].view(f.shape).copy_(f) for f in (p, q))
    arrives = torch.full((batch, n, m), torch.nan, dtype=wire, requires_grad=True)
    compressor.reconstruct(p_read, q_read, out=arrives)
    expected = total - arrives.detach()
    compressor.subtract_reconstruction(total, p, q)
    assert torch.equal(total, expected)
    exact = p.double() @ q.double().mT
    # Entries have the size sqrt(r) and keep the relative precision of the wire's dtype; the largest is above 4.
    assert worst_error(arrives.detach(), exact) < 2 * torch.finfo(wire).eps


@pytest.mark.parametrize("r", [1, 17, 40, 128, 200])
def test_what_is_subtracted_is_what_arrives_at_every_compression_rank(r: int) -> None:
    """MKL computes a product of 200 terms in two parts; added in place, the first would be rounded with the old
    values.
    """
    p, q, total = gaussian(1, 1367, r), gaussian(1, 1000, r, seed=1), gaussian(1, 1367, 1000, seed=2)
    fast = FastLowRank()
    expected = total - fast.reconstruct(p, q)
    fast.subtract_reconstruction(total, p, q)
    assert torch.equal(total, expected)


# --- the two ends of a link -------------------------------------------------------------------------------


def test_the_message_is_p_then_q_and_its_parts_are_views() -> None:
    layout = PackedFactors(3, 4, 2, torch.float32)
    buffer = torch.empty(layout.numel, dtype=layout.dtype)
    p, q = layout.split(buffer)
    assert layout.numel == buffer.numel() == 14
    assert (p.shape, q.shape) == ((3, 2), (4, 2))
    p.copy_(torch.arange(6).view(3, 2))
    q.copy_(torch.arange(6, 14).view(4, 2))
    assert buffer.tolist() == list(range(14))


@pytest.mark.parametrize(
    "buffer",
    [torch.empty(13), torch.empty(14, dtype=torch.bfloat16), torch.empty(2, 7), torch.empty(28)[::2]],
    ids=["size", "dtype", "shape", "strides"],
)
def test_a_buffer_of_another_layout_is_refused(buffer: Tensor) -> None:
    with pytest.raises(ValueError, match=r"contiguous message of 14 values of torch\.float32"):
        PackedFactors(3, 4, 2, torch.float32).split(buffer)


@pytest.mark.parametrize(
    "r, dtype, says",
    [
        (4, torch.float32, "no factors of rank 4"),
        (0, torch.float32, "no factors of rank 0"),
        (2, torch.float64, "float32, bfloat16 or float16"),
    ],
)
def test_layouts_that_no_compressor_makes_are_refused(r: int, dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PackedFactors(3, 4, r, dtype)
