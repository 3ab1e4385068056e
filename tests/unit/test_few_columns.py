"""Our own kernels for large matrices and factors of few columns: against float64, and the library's bits."""

from collections.abc import Iterator
from functools import partial
from importlib import metadata

import numpy as np
import pytest
import torch
from torch import Tensor

from optimus_cc_ext.compressors import (
    FastLowRank,
    LowRank,
    ReferenceLowRank,
    Scratch,
    few_columns,
    few_columns_kernels,
    llvm,
    orthogonalize_fp32,
)
from tests.allocations import Watch
from tests.low_rank_steps import EPS32, first_q, gaussian, worst_error
from tests.unit.test_links import link, run_iteration

pytestmark = pytest.mark.skipif(
    not llvm.is_there(), reason="kernels need llvmlite (pip install 'optimus_cc_ext[cpu]') and an x86-64 CPU with AVX2"
)

BOTH = pytest.mark.parametrize("compressor", [FastLowRank(), ReferenceLowRank()], ids=["fast", "reference"])
SHAPES = pytest.mark.parametrize(
    "n, m, r, with_residual",
    [(300, 1536, 16, True), (50, 992, 8, False), (333, 992, 40, False), (300, 2112, 48, True)],
)
"""Whole blocks and none, tiles that do not divide the columns, rows that are added in pieces."""

SUM = 8 * EPS32
"""Sums of up to 512 products, and of up to 10 such sums: random walks of 23 and 3 steps of eps / 2."""
ENOUGH = orthogonalize_fp32.DONE


@pytest.fixture
def clean() -> Iterator[None]:
    """Kernels are written anew, and forgotten."""
    caches = [
        few_columns_kernels.sum_and_products,
        few_columns_kernels.both_turned,
        few_columns_kernels.turned,
        few_columns_kernels.subtracted,
        few_columns.rebuilds_like_the_library,
    ]
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture(params=["this processor's", "AVX-512", "small"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, clean: None) -> str:
    """As on this processor; as with AVX-512, whose vectors LLVM splits here; or with small blocks and short sums."""
    if request.param == "AVX-512":
        monkeypatch.setattr(llvm, "vector_registers", lambda width: 32)
    if request.param == "small":
        monkeypatch.setattr(few_columns_kernels, "_ROWS_AT_ONCE", 1)
        monkeypatch.setattr(few_columns_kernels, "_TERMS_AT_ONCE", 32)
    return request.param


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers_of_threads() -> Iterator[int]:
    """One, the usual, more than there are cores, more than there is work."""
    for threads in (1, 2, 3, 40):
        torch.set_num_threads(threads)
        yield threads


def scratch() -> few_columns.Take:
    return partial(Scratch().take, device=torch.device("cpu"))


def factorized(matrices: Tensor, residual: Tensor | None, q: Tensor, total: Tensor | None = None) -> tuple:
    (_, n, m), r = matrices.shape, q.shape[2]
    total = torch.full((1, n, m), torch.nan) if total is None else total
    p, new_q = torch.full((1, n, r), torch.nan), torch.full((1, m, r), torch.nan)
    done = few_columns.factorize(
        matrices, residual, q, total=total, p=p, new_q=new_q, enough=ENOUGH, take=scratch()
    )  # fmt: skip
    return done, total, p, new_q


@SHAPES
def test_a_pass_sums_projects_and_projects_back_as_in_float64(n, m, r, with_residual, kernels: str) -> None:
    matrices, q = gaussian(1, n, m), first_q(1, m, r)
    residual = gaussian(1, n, m, seed=1) if with_residual else None
    sums = matrices if residual is None else matrices + residual
    exact = torch.linalg.qr(sums.double() @ q.double()).Q
    for _ in numbers_of_threads():
        done, total, p, new_q = factorized(matrices, residual, q)
        assert done
        assert torch.equal(total, sums)
        assert (p.double().mT @ p.double() - torch.eye(r)).abs().max() < 2e-6  # as of one fp32 pass of Cholesky QR
        missed = p.double() - exact @ (exact.mT @ p.double())
        assert missed.norm() / r**0.5 < SUM
        assert worst_error(new_q, total.double().mT @ p.double()) < SUM


@pytest.mark.parametrize("n", [50, 500])
def test_the_sum_may_be_written_over_the_residual_and_rows_may_be_apart(n: int, kernels: str) -> None:
    apart = gaussian(1, n, 640)[:, :, :512]
    before, q = gaussian(1, n, 512, seed=1), first_q(1, 512, 16)
    for _ in numbers_of_threads():  # none may add to what is another's, nor to what is nobody's
        residual = before.clone()
        expected = factorized(apart.contiguous(), before, q)
        found = factorized(apart, residual, q, total=residual)
        assert found[0] == expected[0] and found[1] is residual
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(one, other)


def test_the_parts_of_threads_that_were_not_to_be_had_are_zero() -> None:
    n, m, r = 100, 256, 16
    matrices, q = gaussian(1, n, m), first_q(1, m, r)
    multiply, rows = few_columns_kernels.sum_and_products(m, r, False)
    total, product, parts = torch.empty(n, m), torch.empty(-(-n // rows) * rows, r), torch.full((3, m, r), torch.nan)
    blocks = torch.empty(3, 2, rows, few_columns_kernels.line(m))
    multiply(
        1,
        matrices=matrices.data_ptr(), stride=m, residual=0, total=total.data_ptr(), q=q.data_ptr(), n=n,
        product=product.data_ptr(), parts=parts.data_ptr(), count=3, blocks=blocks.data_ptr(),
    )  # fmt: skip
    assert worst_error(parts[:1], matrices.double().mT @ (matrices.double() @ q.double())) < SUM
    assert (parts[1:] == 0).all()


@pytest.mark.parametrize("threads", [1, 40])
def test_what_comes_out_does_not_depend_on_what_scratch_memory_held(kernels: str, threads: int) -> None:
    """Padding, blocks that are not full, and the parts of threads that found no work are never read."""
    torch.set_num_threads(threads)
    matrices, q = gaussian(1, 50, 992), first_q(1, 992, 8)
    expected = factorized(matrices, None, q)[1:]
    total, p, new_q = torch.empty(1, 50, 992), torch.empty(1, 50, 8), torch.empty(1, 992, 8)
    done = few_columns.factorize(
        matrices, None, q, total=total, p=p, new_q=new_q, enough=ENOUGH,
        take=lambda _, shape, dtype: torch.full(shape, torch.nan, dtype=dtype),
    )  # fmt: skip
    assert done
    for one, other in zip((total, p, new_q), expected, strict=True):
        assert torch.equal(one, other)


def test_what_fp32_is_not_enough_for_is_handed_back_projected(kernels: str) -> None:
    usual, q = gaussian(1, 300, 512), first_q(1, 512, 16)
    bad = {entry: usual.clone() for entry in (torch.nan, torch.inf)}
    for entry, matrices in bad.items():
        matrices[0, 211, 7] = entry
    dependent = gaussian(1, 300, 3) @ gaussian(1, 3, 512, seed=1)
    for matrices in (dependent, usual * 0.0, usual * 1e-25, *bad.values()):
        done, total, p, _ = factorized(matrices, None, q)
        assert not done
        torch.testing.assert_close(total, matrices, rtol=0, atol=0, equal_nan=True)
        exact = matrices.double() @ q.double()
        largest = exact.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        torch.testing.assert_close(p.double(), exact, rtol=0, atol=SUM * largest, equal_nan=True)


@BOTH
@pytest.mark.parametrize("kind", ["Gaussian", "dependent columns", "zero", "NaN"])
@pytest.mark.parametrize("scale, wire", [(1.0, torch.float32), (1.0, torch.bfloat16), (64.0, torch.float16)])
def test_a_sum_is_factorised_as_by_the_three_phases(compressor: LowRank, kind: str, scale: float, wire) -> None:
    n, m, r = 600, 1024, 16
    matrices, residual, q = gaussian(1, n, m), gaussian(1, n, m, seed=1), first_q(1, m, r)
    if kind == "dependent columns":
        matrices, residual = gaussian(1, n, 3) @ gaussian(1, 3, m, seed=1), torch.zeros(1, n, m)
    if kind == "zero":
        matrices, residual = torch.zeros(1, n, m), torch.zeros(1, n, m)
    if kind == "NaN":
        matrices[0, 3, 4] = torch.nan
    total, p, new_q = torch.empty(1, n, m), torch.empty(1, n, r, dtype=wire), torch.empty(1, m, r)
    compressor.factorize_sum(matrices, residual, q, total=total, p=p, new_q=new_q, scale=scale)
    phases = ReferenceLowRank()
    expected = torch.empty(1, n, r)
    phases.project_sum(matrices, residual, q, total=torch.empty(1, n, m), out=expected)
    phases.orthogonalize(expected, out=expected)
    torch.testing.assert_close(total, matrices + residual, rtol=0, atol=0, equal_nan=True)
    if kind == "NaN":
        assert p.isnan().all() and new_q.isnan().all()
        return
    if kind == "Gaussian":
        # The same basis, of condition 1: rounding of both, and of the wire.
        torch.testing.assert_close(p.float(), scale * expected, rtol=torch.finfo(wire).eps, atol=1e-5 * scale)
    # Of P as it is in `p`, rounded and scaled.
    back = total.double().mT @ p.double()
    assert (new_q.double() - back).abs().max() <= 1e-5 * max(back.abs().max().item(), 1e-30)
    if kind == "dependent columns" and isinstance(compressor, ReferenceLowRank):
        return  # normalised rounding noise, which is no basis
    # Whatever the basis is: what it rebuilds is the part of T in the span of T Q.
    rebuilt = p.double() @ new_q.double().mT / scale**2
    best = torch.linalg.qr(total.double() @ q.double()).Q if kind == "Gaussian" else None
    wanted = total.double() if best is None else best @ (best.mT @ total.double())
    assert (rebuilt - wanted).abs().max() < max(4 * torch.finfo(wire).eps, 1e-5) * max(wanted.abs().max().item(), 1e-30)


def test_the_pass_is_what_a_large_message_takes_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    original = few_columns.factorize
    monkeypatch.setattr(few_columns, "factorize", lambda *a, **k: taken.append(1) or original(*a, **k))
    for n, m, r, batch, wire, expected in (
        (600, 1024, 16, 1, torch.float32, 1),
        (600, 1024, 16, 1, torch.bfloat16, 0),
        (600, 1024, 12, 1, torch.float32, 0),
        (600, 1000, 16, 1, torch.float32, 0),
        (60, 1024, 16, 1, torch.float32, 0),
        (600, 1024, 16, 2, torch.float32, 0),
    ):
        taken.clear()
        FastLowRank().factorize_sum(
            gaussian(batch, n, m), None, first_q(batch, m, r),
            total=torch.empty(batch, n, m), p=torch.empty(batch, n, r, dtype=wire), new_q=torch.empty(batch, m, r),
        )  # fmt: skip
        assert len(taken) == expected, (n, m, r, batch, wire)


@SHAPES
def test_what_is_subtracted_is_a_sum_of_terms_in_order(n, m, r, with_residual, kernels: str) -> None:
    minuend, p, q = gaussian(1, n, m), gaussian(1, n, r, seed=1), gaussian(1, m, r, seed=2)
    product = torch.zeros(1, n, m, dtype=torch.float64)
    for c in range(r):  # fp32 products are exact in fp64, and so is the sum but for one rounding in 2^29
        product = (product + p[:, :, c : c + 1].double() * q[:, :, c].unsqueeze(1).double()).float().double()
    expected = minuend - product.float()
    for _ in numbers_of_threads():
        total = minuend.clone()
        few_columns.subtract(total, p, q, scratch())
        # Where fp64 itself rounds half-way, the last bit of a term differs.
        assert (total != expected).float().mean() < 1e-4
        torch.testing.assert_close(total, expected, rtol=0, atol=4 * EPS32 * product.abs().max().item())


def test_a_library_with_other_bits_is_found_out_and_what_is_subtracted_still_is_what_arrives(
    monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    original, calls = few_columns.subtract, []

    def from_the_other_end(total: Tensor, p: Tensor, q: Tensor, take: few_columns.Take) -> None:
        calls.append(1)
        original(total, p.flip(2), q.flip(2), take)

    monkeypatch.setattr(few_columns, "subtract", from_the_other_end)
    n, m, r = 600, 1024, 16
    total, p, q = gaussian(1, n, m), gaussian(1, n, r, seed=1), gaussian(1, m, r, seed=2)
    fast = FastLowRank()
    expected = total - fast.reconstruct(p, q)
    fast.subtract_reconstruction(total, p, q)
    assert torch.equal(total, expected)
    assert len(calls) == 1  # asked, and not taken


@pytest.mark.parametrize("n, r", [(1500, 16), (31, 8), (48, 48)])
def test_columns_are_made_orthonormal_in_place_or_not(n: int, r: int, kernels: str) -> None:
    p = torch.stack([gaussian(n, r, seed=seed) for seed in range(5)]) * torch.logspace(-3, 3, r)
    expected = torch.linalg.qr(p.double())
    basis = expected.Q * expected.R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(1)
    for _ in numbers_of_threads():
        out = torch.full_like(p, torch.nan)
        amplification = few_columns.orthonormalize(p, out, worth=1e9)
        for one, of_fp64, factor in zip(out.double(), basis, amplification, strict=True):
            assert (one.mT @ one - torch.eye(r)).abs().max() < 1e-6 * factor
            torch.testing.assert_close(one, of_fp64, rtol=0, atol=1e-6 * factor)
        again = p.clone()
        assert few_columns.orthonormalize(again, again, worth=1e9) == amplification
        assert torch.equal(again, out)
        assert few_columns.orthonormalize(p[:1], out[:1], worth=1e9) == amplification[:1]


def test_the_kernels_verdict_is_numpys() -> None:
    p = torch.stack([gaussian(640, 16, seed=seed) @ torch.diag(torch.logspace(0, -seed, 16)) for seed in range(4)])
    p[1, :, 3] += 30 * p[1, :, 4]
    p[2, :, 3] = p[2, :, 4]
    p[3, 5, 7] = torch.inf
    mine = few_columns.orthonormalize(p, torch.empty_like(p), worth=4.0)
    _, numpys = orthogonalize_fp32._weights(p, scratch())
    # Both fp64, from fp32 Gram matrices that differ in rounding.
    np.testing.assert_allclose(mine[:2], numpys[:2], rtol=1e-3)
    assert not mine[2] <= 1e5 and not numpys[2] <= 1e5
    assert np.isnan(mine[3]) and np.isnan(numpys[3])


@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_not_worth_turning_is_left_as_it_was(in_place: bool) -> None:
    p = gaussian(4, 200, 16)
    p[1, :, 5] = p[1, :, 6]
    p[2, 7, 7] = torch.nan
    p[3] = 0.0
    before = p.clone()
    out = p if in_place else torch.full_like(p, torch.nan)
    amplification = few_columns.orthonormalize(p, out, worth=10.0)
    assert amplification[0] < 10 and not any(factor <= 10 for factor in amplification[1:])
    torch.testing.assert_close(out[1:], before[1:], rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(out[0], before[0])


def test_a_second_message_allocates_nothing_and_asks_the_host_nothing() -> None:
    n, m, r = 600, 1024, 16
    fast, matrices, q = FastLowRank(), gaussian(1, n, m), first_q(1, m, r)
    total, p, new_q = torch.zeros(1, n, m), torch.empty(1, n, r), torch.empty(1, m, r)

    def message() -> None:
        fast.factorize_sum(matrices, total, q, total=total, p=p, new_q=new_q)
        fast.subtract_reconstruction(total, p, new_q)
        fast.orthogonalize(new_q, out=new_q)

    message()
    with Watch() as watch:
        message()
    assert watch.allocated == [] and watch.read_by_host == []


def test_large_messages_through_our_kernels_differ_from_the_librarys_in_rounding_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients = [torch.randn(600, 1, 1024, generator=torch.Generator().manual_seed(b)) for b in range(3)]
    passes = []
    original = few_columns.factorize
    monkeypatch.setattr(few_columns, "factorize", lambda *a, **k: passes.append(1) or original(*a, **k))
    ends = {}
    for ours in (True, False):
        with monkeypatch.context() as patch:
            if not ours:
                patch.setattr(llvm, "is_there", lambda: False)
            sender, receiver = link(compressed_backprop_rank=16)
            arrived = run_iteration(sender, receiver, gradients)
            ends[ours] = torch.stack(arrived), sender.residuals()[0].view_as(gradients[0])
        offered = torch.stack(gradients).sum(0)
        torch.testing.assert_close(ends[ours][0].sum(0) + ends[ours][1], offered, rtol=0, atol=2e-5)
    assert len(passes) == len(gradients)
    for one, other in zip(ends[True], ends[False], strict=True):
        # A warm-started Q of noise turns by what rounding turns it, amplified by the gaps of a flat spectrum.
        assert (one - other).norm() < 1e-3 * other.norm()
        assert not torch.equal(one, other)


def test_the_residual_of_a_large_message_is_exactly_what_the_receiver_lacks() -> None:
    sender, receiver = link(compressed_backprop_rank=16)
    sent = torch.randn(600, 1, 1024, generator=torch.Generator().manual_seed(1))
    (arrived,) = run_iteration(sender, receiver, [sent])
    assert torch.equal(sender.residuals()[0].view_as(sent), sent - arrived)


def test_threads_share_a_work_whatever_its_size() -> None:
    writer = llvm.Writer("share", ("counts", "pieces"), width=8)
    counts = writer.place("counts", double=True)
    with writer.loop(*writer.share(writer.argument("pieces"))) as i:
        (counts + i).put(writer.builder.fadd((counts + i).get(), writer.real(1.0)))
    share = writer.compile()
    for threads in (1, 2, 3, 40):
        for pieces in (0, 1, 2, 7, 41):
            done = torch.zeros(pieces + 1, dtype=torch.float64)
            share(threads, counts=done.data_ptr(), pieces=pieces)
            assert done.tolist() == [1.0] * pieces + [0.0]


def test_a_writer_writes_loops_conditions_and_arithmetic() -> None:
    writer = llvm.Writer("odd_squares", ("values", "count"), width=8)
    values, count = writer.place("values"), writer.argument("count")
    with writer.loop(0, count, writer.width) as i:
        vector = (values + i).load()
        (values + i).store(writer.fused(vector, vector, writer.zeros))
    with writer.loop(0, (count * 3 - count) // 2) as i, writer.when(writer.is_less(i % 2, 1)):
        (values + i).put((values + count.at_most(5)).get())
    values_of = torch.arange(16, dtype=torch.float32)
    writer.compile()(1, values=values_of.data_ptr(), count=16)
    assert values_of.tolist() == [25.0 if i % 2 == 0 else float(i * i) for i in range(16)]


@pytest.mark.parametrize("why", ["no llvmlite", "an old one", "another processor", "it fails"])
def test_where_nothing_can_be_compiled_torch_does_the_work(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    def fails() -> float:
        raise RuntimeError("no executable memory")

    if why == "no llvmlite":
        monkeypatch.setattr(metadata, "version", missing)
    elif why == "an old one":
        monkeypatch.setattr(metadata, "version", lambda name: "0.44.0")
    elif why == "another processor":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    else:
        monkeypatch.setattr(llvm, "_trial", fails)
    if why == "it fails":
        with pytest.warns(UserWarning, match="no executable memory"):
            there = llvm.is_there.__wrapped__()
    else:
        there = llvm.is_there.__wrapped__()
    assert not there
    monkeypatch.setattr(llvm, "is_there", lambda: there)
    monkeypatch.setattr(llvm.Writer, "__init__", lambda *_, **__: pytest.fail("a kernel is written"))
    n, m, r = 600, 1024, 16
    matrices, q = gaussian(1, n, m), first_q(1, m, r)
    total, p, new_q = torch.empty(1, n, m), torch.empty(1, n, r), torch.empty(1, m, r)
    fast = FastLowRank()
    fast.factorize_sum(matrices, None, q, total=total, p=p, new_q=new_q)
    assert worst_error(new_q, matrices.double().mT @ p.double()) < 24 * EPS32
    left = total - fast.reconstruct(p, new_q)
    fast.subtract_reconstruction(total, p, new_q)
    assert torch.equal(total, left)


def test_the_trial_is_not_passed_by_a_function_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm.Compiled, "__call__", lambda *_, **__: None)
    assert not llvm.is_there.__wrapped__()
