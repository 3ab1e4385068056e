"""Measurements of compression: errors, times, and the paper's error statistics."""

import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from optimus_cc_ext.metrics.error_statistics import ErrorStatistics, StatisticsSums
from optimus_cc_ext.metrics.gauge import Gauge

CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_errors_add_up_over_an_iteration() -> None:
    gauge = Gauge()
    gauge.begin(True)
    pairs = [(noise(3, 5, seed=s), noise(3, 5, seed=10 + s)) for s in range(3)]
    for matrix, error in pairs:
        gauge.note_compressed(matrix)
        gauge.note_error(error)
    of, error = (sum(float(t.double().square().sum()) for t in tensors) for tensors in zip(*pairs, strict=True))
    # The tolerance is the rounding of the rows' norms to fp32, squared: 2^-23.
    assert gauge.squares() == pytest.approx((error, of), rel=2.0**-23)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measuring_takes_memory_for_the_norms_of_rows_and_no_copy_in_fp64(dtype: torch.dtype) -> None:
    gauge, matrix = Gauge(), torch.ones(2, 64, 4096, dtype=dtype)
    gauge.begin(True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        gauge.note_compressed(matrix)
    # On a CPU torch widens bf16 to fp32 first; on a GPU it widens values as it reads them.
    allowed = 4 * matrix.numel() if dtype == torch.bfloat16 else 0
    assert sum(max(event.self_cpu_memory_usage, 0) for event in watched.key_averages()) < allowed + 10_000
    assert gauge.squares()[1] == pytest.approx(matrix.numel())


def test_the_norm_of_many_values_in_a_row_does_not_drift() -> None:
    gauge, flat = Gauge(), noise(128 * 10_001)
    gauge.begin(True)
    gauge.note_compressed(flat)
    assert gauge.squares()[1] == pytest.approx(float(flat.double().square().sum()), rel=2.0**-23)


def test_the_error_of_a_projection_is_what_it_leaves_out() -> None:
    gauge, matrix = Gauge(), noise(2, 20, 9)
    basis = torch.linalg.qr(noise(2, 20, 4, seed=1)).Q
    gauge.begin(True)
    gauge.note_projection(matrix, kept=matrix.mT @ basis)
    error, of = gauge.squares()
    left_out = (matrix - basis @ (basis.mT @ matrix)).double()
    # The tolerance is that of fp32 products, and of the norms of rows, which are rounded to fp32.
    assert error == pytest.approx(float(left_out.square().sum()), rel=1e-5)
    assert 0 < error < of


def test_each_measured_iteration_starts_from_nothing_and_any_other_counts_nothing() -> None:
    gauge = Gauge()
    for measured in (False, True, True):
        gauge.begin(measured)
        gauge.note_compressed(torch.ones(4))
        gauge.note_error(torch.ones(4))
        with gauge.timed(CPU):
            time.sleep(0.01)
        assert gauge.squares() == (pytest.approx((4.0, 4.0)) if measured else (0.0, 0.0))
        assert 0.01 <= gauge.seconds() < 0.2 if measured else gauge.seconds() == 0.0


@pytest.mark.parametrize("ahead", [1, 2, 4], ids=lambda n: f"{n} activations ahead")
def test_an_error_meets_the_difference_of_its_activation_and_the_next(ahead: int) -> None:
    """On a stage whose warm-up is `ahead` - 1, activations come so many passes before gradients go."""
    activations = [noise(4, 2, 6, seed=b) for b in range(4)]
    errors = [noise(1, 8, 6, seed=100 + b) for b in range(4)]
    statistics = ErrorStatistics()
    statistics.begin(True)
    for b in range(4):
        for received in range(b and b + ahead - 1, min(b + ahead, 4)):
            statistics.activation(activations[received])
        statistics.error(b, errors[b])
    found = statistics.sums()
    expected = torch.zeros(3)
    for b in range(3):
        error, difference = errors[b].flatten(), (activations[b] - activations[b + 1]).flatten()
        cosine = error @ difference / (error.norm() * difference.norm())
        expected += torch.stack([cosine, error.mean(), difference.mean()])
    assert found.pairs == 3
    assert [found.cosine, found.error_mean, found.difference_mean] == pytest.approx(expected.tolist(), abs=1e-6)


def test_statistics_keep_nothing_of_messages_sent_as_they_are_or_of_an_unmeasured_iteration() -> None:
    statistics = ErrorStatistics()
    statistics.activation(noise(2, 2))
    statistics.error(0, noise(2, 2))
    statistics.activation(noise(2, 2))
    assert statistics.sums() == StatisticsSums()
    statistics.begin(True)
    for b in range(4):
        statistics.activation(noise(4, 2, 6, seed=b))
        statistics.no_error(b)
    assert not statistics._activations
