"""Inputs of a compressor's steps: private random numbers, the first Q, and the Q of every later step."""

import subprocess
import sys

import pytest
import torch

from optimus_cc_ext.compressors.low_rank import FastLowRank, initial_q, next_warm_start
from optimus_cc_ext.compressors.numerics import private_generator
from tests.low_rank_steps import EPS32, first_q, gaussian, step

FAST = FastLowRank()


def test_drawing_depends_on_the_generator_alone_and_torchs_global_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    q = first_q(2, 40, 8)
    next_warm_start(torch.zeros_like(q), q, FAST)
    step(FAST, gaussian(2, 30, 40), q)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first_q(2, 40, 8), q)
    generator = private_generator(3)
    one, two = (initial_q(1, 40, 8, generator=generator, device="cpu") for _ in range(2))
    assert not torch.equal(one, two), "a new one at every draw"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_initial_qs_are_orthonormal(dtype: torch.dtype) -> None:
    q = first_q(3, 50, 50, dtype=dtype)
    assert q.dtype == dtype
    gram = q.double().mT @ q.double()
    # bf16 rounds each entry by up to 2^-9; the other dtypes are exact up to the rounding of fp32, or to the shift of
    # fp64.
    tolerance = {torch.float32: 2 * EPS32, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    assert (gram - torch.eye(50, dtype=torch.float64)).abs().max() < tolerance


def test_salts_name_streams_that_differ() -> None:
    salts = [(), (0,), ("0",), (0, 0), (1,), ("ab",), ("a", "b"), ("cb", 1, 2), ("cb", 12), ("sc", 1, 2)]
    seeds = {private_generator(1, *salt).initial_seed() for salt in salts}
    assert len(seeds) == len(salts)
    assert private_generator(2).initial_seed() not in seeds


@pytest.mark.full
def test_salts_name_the_same_stream_in_every_process() -> None:
    # Python's own hash() of a string differs from process to process.
    program = (
        "from optimus_cc_ext.compressors.numerics import private_generator\n"
        "print(private_generator(1234, 'compressed_backprop', 3).initial_seed())"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert int(elsewhere) == private_generator(1234, "compressed_backprop", 3).initial_seed()


def test_a_zero_gradient_does_not_kill_the_link() -> None:
    fallback = first_q(2, 20, 4)
    _, q_new, _ = step(FAST, torch.zeros(2, 30, 20), fallback)
    q = next_warm_start(q_new, fallback, FAST)
    assert torch.equal(q, fallback)
    matrices = gaussian(2, 30, 4) @ gaussian(2, 4, 20, seed=1)
    # A matrix of rank 4 at compression rank 4 has an error of fp32 rounding, amplified by the condition of P = M Q.
    torch.testing.assert_close(step(FAST, matrices, q)[2], matrices, rtol=0, atol=1e-4)


@pytest.mark.parametrize("r", [1, 4, 40, 200])
def test_a_column_that_died_among_many_matrices_comes_back_from_the_fallback(r: int) -> None:
    q_new, fallback = gaussian(7, 300, r), first_q(7, 300, r)
    whole = next_warm_start(q_new, fallback, FAST)
    q_new[5, :, r // 2] = 0
    q = next_warm_start(q_new, fallback, FAST)
    replaced = (q[5] == fallback[5]).all(0)
    assert replaced.nonzero().tolist() == [[r // 2]]
    torch.testing.assert_close(q[:5], whole[:5], rtol=0, atol=8 * EPS32)
    # The columns are independent, because random directions are not parallel.
    assert r > 4 or torch.linalg.svdvals(q.double()).min() > 0.05


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_non_finite_reaches_the_next_step(bad: float) -> None:
    q_new, fallback = gaussian(2, 20, 4), first_q(2, 20, 4)
    q_new[0, 3, 1] = bad
    q = next_warm_start(q_new, fallback, FAST)
    assert torch.equal(q[0], fallback[0])
    assert q.isfinite().all()


def test_the_next_factor_is_an_orthonormal_basis_of_the_one_that_was_sent_however_small() -> None:
    q_new, fallback = gaussian(2, 20, 4), first_q(2, 20, 4)
    found = next_warm_start(q_new, fallback, FAST)
    q = found.double()
    torch.testing.assert_close(q.mT @ q, torch.eye(4).double().expand(2, 4, 4), rtol=0, atol=2 * EPS32)
    torch.testing.assert_close(q @ (q.mT @ q_new.double()), q_new.double(), rtol=0, atol=10 * EPS32)
    torch.testing.assert_close(next_warm_start(q_new * 1e-25, fallback, FAST), found, rtol=0, atol=4 * EPS32)


def test_a_fallback_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fallback has shape \(1, 20, 3\), the factor \(1, 20, 4\)"):
        next_warm_start(gaussian(1, 20, 4), gaussian(1, 20, 3), FAST)


def test_the_warm_start_never_asks_for_a_value() -> None:
    q = torch.empty(2, 20, 4, device="meta")
    assert next_warm_start(q, q, FAST).shape == q.shape
