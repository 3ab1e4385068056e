"""Sums, differences, and matrices that are large enough for a way of their own, each way on every processor.

The ways of other processors are taken on this one, too: slower here, with the same results.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from optimus_cc_ext.compressors import FastLowRank, LowRank, ReferenceLowRank, llvm, products
from optimus_cc_ext.compressors.products import adds_when_complete, in_row_blocks, is_faster_turned, multiply
from tests.allocations import Watch
from tests.low_rank_steps import EPS32, first_q, gaussian, step, worst_error

SMALL, MIDDLE, LARGE = (2, 30, 40, 4), (3, 260, 384, 11), (2, 900, 2048, 8)
"""(batch, n, m, r). On a CPU the middle one's factors are made turned, the large one is taken matrix by matrix, here in
two blocks of rows each."""
THIN = (1, 4096, 2100, 1)
"""The product of one block of rows is not large, the matrix's is."""
SIZES = pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE], ids=["small", "middle", "large"])
WIRE = pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SUM_OF_2048 = 24 * EPS32
"""An fp32 sum of so many products: its rounding errors add up like a random walk, 45 steps of eps / 2."""

ONEDNN_IS_THERE, LINEAR_IS_FASTER = products._onednn_is_there, products._linear_is_faster
WAYS = {
    "oneDNN": (True, False, False),
    "AVX2": (False, True, False),
    "torch's": (False, False, False),
    "ours": (ONEDNN_IS_THERE(), LINEAR_IS_FASTER(), True),
}
"""Name to whether products of batches go to oneDNN, those with few columns to its linear layer, and to kernels of ours
what those are for."""


BOTH = pytest.mark.parametrize(
    "compressor, way",
    [
        pytest.param(ReferenceLowRank(), "torch's", id="reference"),
        *(pytest.param(FastLowRank(), way, id=f"fast, {way}") for way in WAYS),
    ],
    indirect=["way"],
)


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    batches, linear, ours = WAYS[request.param]
    if ours and not llvm.is_there():
        pytest.skip("kernels need llvmlite (pip install 'optimus_cc_ext[cpu]') and an x86-64 CPU with AVX2")
    monkeypatch.setattr(products, "_onednn_is_there", lambda: batches)
    monkeypatch.setattr(products, "_linear_is_faster", lambda: linear)
    if not ours:
        monkeypatch.setattr(llvm, "is_there", lambda: False)
    # So that a matrix of a test's size has several.
    monkeypatch.setattr(products, "_BLOCK_VALUES", 1 << 20)
    adds_when_complete.cache_clear()
    yield request.param
    adds_when_complete.cache_clear()


@pytest.mark.parametrize("size, turned", [(SMALL, False), (MIDDLE, True)], ids=["small", "middle"])
def test_factors_of_the_middle_matrices_here_are_made_turned(size: tuple[int, int, int, int], turned: bool) -> None:
    batch, n, m, r = size
    matrices, p, q = torch.empty(batch, n, m), torch.empty(batch, n, r), torch.empty(batch, m, r)
    assert is_faster_turned(matrices, q) == is_faster_turned(matrices.mT, p) == turned
    assert not is_faster_turned(matrices.double(), q.double()) and not is_faster_turned(matrices.to("meta"), q)


def test_the_large_matrices_here_are_taken_in_two_blocks_each() -> None:
    batch, n, m, r = LARGE
    assert len(list(in_row_blocks(torch.empty(batch, m, r), torch.empty(batch, n, m)))) == 2 * batch


def as_in_a_bucket(matrices: Tensor) -> Tensor:
    """The same values with other parameters' between them: contiguous rows, a batch that is strided."""
    batch, n, m = matrices.shape
    view = matrices.new_full((batch, n * m + 7), torch.nan)[:, : n * m].view(batch, n, m)
    return view.copy_(matrices)


@BOTH
@SIZES
@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_projected_as_in_float64(compressor, size, residual_dtype, dtype) -> None:
    batch, n, m, r = size
    matrices, q = as_in_a_bucket(gaussian(batch, n, m, dtype=dtype)), first_q(batch, m, r)
    residual = None if residual_dtype is None else gaussian(batch, n, m, seed=1, dtype=residual_dtype)
    total, p = torch.full((batch, n, m), torch.nan), torch.full((batch, n, r), torch.nan)
    compressor.project_sum(matrices, residual, q, total=total, out=p)
    exact = matrices.double() + (0 if residual is None else residual.double())
    assert worst_error(total, exact) <= EPS32 / 2  # of the largest entry: one rounding, of the sum
    assert worst_error(p, exact @ q.double()) < SUM_OF_2048


@BOTH
@SIZES
def test_the_sum_may_be_written_over_the_residual(compressor: LowRank, size: tuple[int, int, int, int]) -> None:
    batch, n, m, r = size
    matrices, residual, q = gaussian(batch, n, m), gaussian(batch, n, m, seed=1), first_q(batch, m, r)
    total, p, again = torch.empty_like(residual), torch.empty(batch, n, r), torch.empty(batch, n, r)
    compressor.project_sum(matrices, residual, q, total=total, out=p)
    compressor.project_sum(matrices, residual, q, total=residual, out=again)
    assert torch.equal(residual, total) and torch.equal(again, p)


@BOTH
@SIZES
def test_the_projected_sum_is_rounded_to_the_dtype_that_it_is_written_in(compressor: LowRank, size) -> None:
    batch, n, m, r = size
    matrices, residual, q = gaussian(batch, n, m), gaussian(batch, n, m, seed=1), first_q(batch, m, r)
    total, exact = torch.empty_like(residual), torch.empty(batch, n, r)
    rounded = torch.full((batch, n, r), torch.nan, dtype=torch.bfloat16)
    compressor.project_sum(matrices, residual, q, total=total, out=exact)
    compressor.project_sum(matrices, residual, q, total=total, out=rounded)
    assert torch.equal(rounded, exact.bfloat16())


@BOTH
@pytest.mark.parametrize("size", [SMALL, LARGE, THIN], ids=["small", "large", "thin"])
@WIRE
def test_what_is_subtracted_is_what_the_other_end_rebuilds(compressor, size, wire) -> None:
    batch, n, m, r = size
    total = gaussian(batch, n, m)
    p, q = gaussian(batch, n, r, seed=1, dtype=wire), gaussian(batch, m, r, seed=2, dtype=wire)
    # The receiver's factors lie elsewhere, at another alignment, and it writes into a buffer that requires grad.
    p_read, q_read = (torch.empty(f.numel() + 1, dtype=wire)[1:].view(f.shape).copy_(f) for f in (p, q))
    arrives = torch.full((batch, n, m), torch.nan, dtype=wire, requires_grad=True)
    compressor.reconstruct(p_read, q_read, out=arrives)
    expected = total - arrives.detach()
    compressor.subtract_reconstruction(total, p, q)
    assert torch.equal(total, expected)
    exact = p.double() @ q.double().mT
    # Entries of size sqrt(r), of which the wire's dtype keeps its digits; the largest is above 4.
    assert worst_error(arrives.detach(), exact) < 2 * torch.finfo(wire).eps


@pytest.mark.parametrize("r", [1, 3, 11, 16, 17, 40, 128, 200])
@pytest.mark.parametrize("n, m", [(900, 2048), (1367, 1000)])
def test_what_is_subtracted_is_what_arrives_at_every_compression_rank(n: int, m: int, r: int) -> None:
    """MKL makes a product of 200 terms in two parts, and the first is added to what is there before the second."""
    p, q, total = gaussian(1, n, r), gaussian(1, m, r, seed=1), gaussian(1, n, m, seed=2)
    fast = FastLowRank()
    expected = total - fast.reconstruct(p, q)
    fast.subtract_reconstruction(total, p, q)
    assert torch.equal(total, expected)


def test_a_library_that_adds_term_by_term_is_found_out_and_what_is_subtracted_still_is_what_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, n, m, r = LARGE

    def term_by_term(into: Tensor, a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
        for k in range(a.shape[2]):
            into.add_(a[:, :, k : k + 1] * b[:, k : k + 1], alpha=alpha)
        return into

    monkeypatch.setattr(Tensor, "baddbmm_", term_by_term)
    assert not adds_when_complete(n // 2, r, m)
    total, p, q = gaussian(batch, n, m), gaussian(batch, n, r, seed=1), gaussian(batch, m, r, seed=2)
    fast = FastLowRank()
    expected = total - fast.reconstruct(p, q)
    fast.subtract_reconstruction(total, p, q)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("precision", ["none", "ieee", "bf16"])
def test_the_precision_that_the_user_has_set_is_the_same_afterwards(precision: str) -> None:
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = precision
        batch, n, m, r = LARGE
        step(FastLowRank(), gaussian(batch, n, m), first_q(batch, m, r))
        assert settings.fp32_precision == precision
        with pytest.raises(RuntimeError, match="size"):
            multiply(gaussian(1, n, m), gaussian(1, m + 1, 128), torch.empty(1, n, 128))
        assert settings.fp32_precision == precision
    finally:
        settings.fp32_precision = before


@pytest.mark.parametrize("capabilities", [{"amx_tile": True}, {}], ids=["with AMX", "unknown"])
def test_a_processor_that_might_round_to_bf16_is_not_permitted_to(capabilities, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert not ONEDNN_IS_THERE.__wrapped__()


@pytest.mark.parametrize("capability", ["AVX512", "DEFAULT"])
def test_the_linear_layer_is_for_avx2_alone(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert not LINEAR_IS_FASTER.__wrapped__()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert LINEAR_IS_FASTER.__wrapped__()


def test_the_library_is_asked_in_fp32_whatever_the_defaults_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "equal", lambda a, b: seen.append((a.dtype, a.device.type)) or True)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            adds_when_complete(8, 4, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [(torch.float32, "cpu")]


@BOTH
@SIZES
@WIRE
def test_matrices_are_multiplied_as_in_float64(compressor: LowRank, size, wire: torch.dtype) -> None:
    batch, n, m, r = size
    matrices, q = as_in_a_bucket(gaussian(batch, n, m, dtype=wire)), first_q(batch, m, r)
    p = compressor.project(matrices, q)
    assert worst_error(p, matrices.double() @ q.double()) < SUM_OF_2048
    back = compressor.back_project(matrices, p)
    assert worst_error(back, matrices.double().mT @ p.double()) < SUM_OF_2048
    left = gaussian(batch, n, m, seed=3)
    exact = left.double() - 0.25 * p.double() @ back.double().mT
    compressor.deflate(left, p, back, share=0.25)
    assert worst_error(left, exact) < 4 * EPS32


def test_all_ways_differ_in_their_rounding_only(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = WAYS[way][:2]
    of_this_processor = (ONEDNN_IS_THERE(), LINEAR_IS_FASTER()) == libraries and any(libraries)
    batch, n, m, r = LARGE
    fast, matrices, q = FastLowRank(), gaussian(batch, n, m), first_q(batch, m, r)
    one_way = step(fast, matrices, q)
    monkeypatch.setattr(products, "_onednn_is_there", lambda: False)
    monkeypatch.setattr(products, "_linear_is_faster", lambda: False)
    for one, other in zip(one_way, step(fast, matrices, q), strict=True):
        error = worst_error(one, other)
        assert error < SUM_OF_2048
        assert error > 0 or not of_this_processor  # or it is not another way


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_entry_of_a_large_matrix_reaches_its_own_results_only(bad: float) -> None:
    batch, n, m, r = LARGE
    fast, matrices, q = FastLowRank(), gaussian(batch, n, m), first_q(batch, m, r)
    clean = step(fast, matrices, q)[2]
    matrices[1, 700, 5] = bad
    total, p = torch.empty_like(matrices), torch.empty(batch, n, r)
    fast.project_sum(matrices, None, q, total=total, out=p)
    assert not p[1].isfinite().all()
    approximation = step(fast, matrices, q)[2]
    assert approximation[1].isnan().all()
    assert torch.equal(approximation[0], clean[0])


@pytest.mark.parametrize(
    "size", [SMALL, MIDDLE, LARGE, (2, 900, 2048, 16)], ids=["small", "middle", "large", "large, more columns"]
)
@WIRE
def test_a_second_message_allocates_nothing_but_with_avx2_what_is_projected(size, wire, way: str) -> None:
    batch, n, m, r = size
    fast, matrices, q = FastLowRank(), gaussian(batch, n, m, dtype=wire), first_q(batch, m, r)
    total, p, back = torch.zeros(batch, n, m), torch.empty(batch, n, r), torch.empty(batch, m, r)
    arrives = torch.empty(batch, n, m, dtype=wire)
    p_wire, back_wire = p.to(wire), back.to(wire)

    def message() -> None:
        fast.project_sum(matrices, total, q, total=total, out=p)
        fast.orthogonalize(p, out=p)
        p_wire.copy_(p)
        back_wire.copy_(fast.back_project(total, p_wire, out=back))
        fast.subtract_reconstruction(total, p_wire, back_wire)
        fast.reconstruct(p_wire, back_wire, out=arrives)
        fast.deflate(total, p, back, share=0.5)

    message()
    with Watch() as watch:
        message()
    assert watch.read_by_host == []
    # Of 8 columns a block of rows is not large.
    linear = WAYS[way][1]
    blocks = 2 * batch if linear and r == 16 else 0
    assert watch.allocated == [f"mkldnn._linear_pointwise.default ({n // 2}, {r})"] * blocks
