"""The two products of Cholesky QR of which half is enough, by kernels of our own: against float64."""

from collections.abc import Iterator

import pytest
import torch

from optimus_cc_ext.compressors import llvm, triangles
from tests.low_rank_steps import EPS32, gaussian, worst_error

pytestmark = pytest.mark.skipif(
    not (llvm.is_there() and triangles.takes(torch.empty(40, 128, 128))),
    reason="kernels need llvmlite (pip install 'optimus_cc_ext[cpu]') and an x86-64 CPU with AVX2, without AVX-512",
)

SHAPES = pytest.mark.parametrize("batch, n, r", [(3, 700, 128), (1, 129, 80), (2, 96, 96), (5, 400, 256)])
SUM = 8 * EPS32
"""Sums of up to 256 products, or of sums of 128: random walks of 16 steps of eps / 2, and a few."""


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers_of_threads() -> Iterator[int]:
    for threads in (1, 2, 3, 9):
        torch.set_num_threads(threads)
        yield threads


def full_of_nan() -> triangles.Take:
    return lambda _, shape, dtype: torch.full(shape, torch.nan, dtype=dtype)


@SHAPES
def test_the_lower_triangle_of_a_gram_matrix_is_float64s(batch: int, n: int, r: int) -> None:
    p = gaussian(batch, n, r)
    exact = (p.double().mT @ p.double()).tril()
    for _ in numbers_of_threads():
        out = torch.full((batch, r, r), torch.nan)
        triangles.gram(p, out, full_of_nan())
        assert worst_error(out.tril(), exact) < SUM


@SHAPES
def test_columns_are_turned_by_a_triangle_in_place_or_not(batch: int, n: int, r: int) -> None:
    p, weights = gaussian(batch, n, r), gaussian(batch, r, r, seed=1).tril()
    exact = p.double() @ weights.double().mT
    for _ in numbers_of_threads():
        out = torch.full_like(p, torch.nan)
        triangles.turn(p, weights, out, full_of_nan())
        assert worst_error(out, exact) < SUM
        again = p.clone()
        triangles.turn(again, weights, again, full_of_nan())
        assert torch.equal(again, out)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_entry_reaches_its_own_matrix_only(bad: float) -> None:
    p, weights = gaussian(3, 200, 128), gaussian(3, 128, 128, seed=1).tril()
    grams, turned = torch.empty(3, 128, 128), torch.empty_like(p)
    triangles.gram(p, grams, full_of_nan())
    triangles.turn(p, weights, turned, full_of_nan())
    p[1, 130, 77] = bad
    also = torch.empty_like(grams), torch.empty_like(turned)
    triangles.gram(p, also[0], full_of_nan())
    triangles.turn(p, weights, also[1], full_of_nan())
    for after, before in zip(also, (grams, turned), strict=True):
        assert torch.equal(after[::2], before[::2])
        assert not after[1].isfinite().all()
    assert not also[0][1, 77, 77].isfinite()


def test_they_are_for_many_columns_that_are_whole_tiles_and_for_a_matrix_for_half_of_the_threads() -> None:
    torch.set_num_threads(4)
    assert triangles.takes(torch.empty(2, 300, 128)) and not triangles.takes(torch.empty(1, 300, 128))
    assert not triangles.takes(torch.empty(2, 300, 120))
    assert not triangles.takes(torch.empty(2, 300, 272))
    assert not triangles.takes(torch.empty(2, 300, 128, dtype=torch.float64))
    assert not triangles.takes(torch.empty(2, 128, 300).mT[:, :, :128])
    assert not triangles.takes(torch.empty(2, 300, 128, device="meta"))


def test_a_processor_with_avx512_is_left_to_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(llvm, "is_there", lambda: True)
    assert not triangles.takes(torch.empty(40, 300, 128))
