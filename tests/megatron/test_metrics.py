"""The log of a real run says what compression left out, remembered and cost, on all stages, when Megatron logs."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import optimus_cc_ext
from optimus_cc_ext.metrics.error_statistics import ErrorStatistics
from optimus_cc_ext.techniques.compressed_backprop import SendingLink
from tests.megatron.optimus_runs import install, run_optimus

FLAGS = shlex.split("""
    --compressed-backprop --compressed-backprop-rank 4 --compressed-backprop-messages all --dp-compression
    --dp-compression-rank 4 --dp-compression-stages 1 --compression-error-statistics
    --train-iters 6 --log-interval 2 --tensorboard-log-interval 2 --eval-interval 3 --eval-iters 1
""")
PP2_DP2 = (4, ("--pipeline-model-parallel-size", "2"))

_seen: dict[str, Any] = {"reports": [], "links": {}, "residuals": {}, "statistics": 0}


def _install_and_watch() -> None:
    """Measure the same things another way: from the message that is sent, and from what it was made of."""
    from optimus_cc_ext.hooks import training

    install()
    collect, compress, keep = training.collect, SendingLink._compress, ErrorStatistics.error

    def collecting(session: Any, *args: Any) -> Any:
        report = collect(session, *args)
        _seen["reports"].append(report)
        _seen["residuals"][session._step.iteration] = [float(r.norm()) for r in _residuals(session)]
        return report

    def compressing(self: Any, gradient: torch.Tensor, buffer: torch.Tensor, state: Any) -> Any:
        offered = state.residual.value.clone().view_as(gradient) + gradient
        message = compress(self, gradient, buffer, state)
        p, q = self.plan.wire(gradient.shape, gradient.dtype).split(buffer)
        lost = offered - (p @ q.T).view_as(gradient)
        sums = _seen["links"].setdefault(optimus_cc_ext.current_session()._step.iteration, [0.0, 0.0])
        sums[0] += float(lost.square().sum())
        sums[1] += float(offered.square().sum())
        return message

    def keeping(self: Any, *args: Any) -> None:
        _seen["statistics"] += self.on
        keep(self, *args)

    training.collect, SendingLink._compress, ErrorStatistics.error = collecting, compressing, keeping


def _residuals(session: Any) -> list[torch.Tensor]:
    return [residual for technique in session.techniques for residual in technique.states.residuals()]


def _what_was_seen(model: Any, optimizer: Any) -> dict[str, Any]:
    session = optimus_cc_ext.current_session()
    assert session is not None
    return _seen | {"stage": session.grid.place.stage, "rank": session.grid.place.rank}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensorboard")
    runs = run_optimus(
        PP2_DP2, [*FLAGS, "--tensorboard-dir", str(folder)], before=_install_and_watch, probe=_what_was_seen
    )
    return [run.probed for run in runs], folder


def test_every_rank_reads_the_same_report_at_the_logging_interval_only(run):
    ranks, _ = run
    reports = [rank["reports"] for rank in ranks]
    assert [len(r) for r in reports] == [3] * 4, "after iterations 2, 4 and 6"
    assert all(r == reports[0] for r in reports)
    assert [stage.ranks for stage in reports[0][0].stages] == [2, 2]
    # Stage 1 sends gradients; 4 micro-batches a replica, 3 logged iterations of 6.
    assert [rank["statistics"] for rank in ranks] == [0, 0, 12, 12]


def test_errors_and_residuals_are_those_of_the_logged_iteration(run):
    ranks, _ = run
    for report, iteration in zip(ranks[0]["reports"], (1, 3, 5), strict=True):
        senders = [rank for rank in ranks if rank["stage"] == 1]
        lost, offered = (sum(rank["links"][iteration][i] for rank in senders) for i in (0, 1))
        # The watcher sums up fp32 squares.
        assert report.stages[1].links.error == pytest.approx(lost, rel=1e-4)
        assert report.stages[1].links.compressed == pytest.approx(offered, rel=1e-4)
        assert 0.1 < report.stages[1].links.relative_error < 1
        residual = sum(rank["residuals"][iteration + 1][0] ** 2 for rank in senders)
        assert report.stages[1].links.residual == pytest.approx(residual, rel=1e-4)
        assert report.stages[0].links.error == 0, "the first stage sends no gradients"
        assert report.stages[0].links.seconds > 0, "but it decompresses"
        assert 0.1 < report.stages[0].buckets.relative_error < 1
        assert report.stages[1].buckets == replace(report.stages[1].buckets, error=0, compressed=0, seconds=0)
        # Errors and differences of activations have nothing to do with each other in an untrained model.
        statistics = report.stages[1].statistics
        assert statistics.pairs == 6, "3 pairs of consecutive micro-batches on each of 2 replicas"
        assert abs(statistics.cosine / statistics.pairs) < 0.2


def test_tensorboard_has_every_scalar_of_the_report(run):
    ranks, folder = run
    events = EventAccumulator(str(folder)).Reload()
    for index, report in enumerate(ranks[0]["reports"]):
        for name, value in report.scalars().items():
            assert events.Scalars(name)[index].value == pytest.approx(value, rel=1e-5), name
    assert Path(folder).exists() and "optimus-cc/CB relative error/stage 1" in report.scalars()
    assert "optimus-cc/SC milliseconds/stage 0" in report.scalars()


def test_the_lines_for_the_terminal_say_all_of_it(run):
    ranks, _ = run
    traffic, compression, statistics = ranks[0]["reports"][-1].lines()
    assert traffic.startswith("traffic per iteration | pipeline forward: ")
    assert "CB: error " in compression and " | SC: error " in compression and " ms" in compression
    assert statistics.startswith("errors against activation differences | stage 1: cosine ")
