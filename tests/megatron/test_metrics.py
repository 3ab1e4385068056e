"""Log of a real run: compression errors, residuals and seconds of all stages, at Megatron's logging interval."""

import re
from dataclasses import replace
from statistics import median

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.megatron.runs import REPORTED
from tests.megatron.specs import Run, uses


def reports(run: Run) -> list:
    return run.ranks[0].probed["reports"]


@uses(REPORTED)
def test_every_rank_reads_the_same_report_at_the_logging_interval_only(runs):
    everyone = [rank.probed["reports"] for rank in runs.ranks]
    assert [len(r) for r in everyone] == [3] * 4, "after iterations 2, 4 and 6"
    assert all(r == everyone[0] for r in everyone)
    assert [stage.ranks for stage in everyone[0][0].stages] == [2, 2]
    # Stage 1 sends gradients of 4 micro-batches per replica, in 3 logged iterations of 6.
    assert [rank.probed["statistics"] for rank in runs.ranks] == [0, 0, 12, 12]


@uses(REPORTED)
def test_errors_and_residuals_are_those_of_the_logged_iteration(runs):
    for report, iteration in zip(reports(runs), (1, 3, 5), strict=True):
        senders = [rank.probed for rank in runs.ranks if rank.stage == 1]
        lost, offered = (sum(rank["links"][iteration][i] for rank in senders) for i in (0, 1))
        # The watcher sums squares in fp32.
        assert report.stages[1].techniques["pipeline backward"].error == pytest.approx(lost, rel=1e-4)
        assert report.stages[1].techniques["pipeline backward"].compressed == pytest.approx(offered, rel=1e-4)
        assert 0.1 < report.stages[1].techniques["pipeline backward"].relative_error < 1
        residual = sum(rank["residuals"][iteration + 1][0] ** 2 for rank in senders)
        assert report.stages[1].techniques["pipeline backward"].residual == pytest.approx(residual, rel=1e-4)
        assert report.stages[0].techniques["pipeline backward"].error == 0, "the first stage sends no gradients"
        assert report.stages[0].techniques["pipeline backward"].seconds > 0, "but it decompresses"
        assert 0.1 < report.stages[0].techniques["DP gradients"].relative_error < 1
        assert report.stages[1].techniques["DP gradients"] == replace(
            report.stages[1].techniques["DP gradients"], error=0, compressed=0, seconds=0
        )
        # Errors are unrelated to differences of activations in an untrained model.
        statistics = report.stages[1].statistics
        assert statistics.pairs == 6, "3 pairs of consecutive micro-batches on each of 2 replicas"
        assert abs(statistics.cosine / statistics.pairs) < 0.2


@uses(REPORTED)
def test_tensorboard_has_every_scalar_of_the_report(runs):
    events = EventAccumulator(str(runs.folder)).Reload()
    for index, report in enumerate(reports(runs)):
        for name, value in report.scalars().items():
            assert events.Scalars(name)[index].value == pytest.approx(value, rel=1e-5), name
    assert {
        "optimus-cc/pipeline backward relative error/stage 1",
        "optimus-cc/DP gradients milliseconds/stage 0",
    } <= reports(runs)[-1].scalars().keys()


@uses(REPORTED)
def test_the_end_of_a_run_is_one_line_and_its_figures_have_tags_of_their_own(runs):
    lines = [line for line in runs.ranks[-1].said if " iterations: " in line]
    raw, sent = (sum(both[side] for both in reports(runs)[-1].traffic.values()) / 1e6 for side in (0, 1))
    assert len(lines) == 1
    found = re.fullmatch(r"6 iterations: ([\d.e-]+) s each; ([\d.]+) of ([\d.]+) MB .+ sent in each[,;] .+", lines[0])
    assert found is not None and (float(found[2]), float(found[3])) == (
        pytest.approx(sent, abs=0.1),
        pytest.approx(raw, abs=0.1),
    )
    events = EventAccumulator(str(runs.folder)).Reload()
    seconds, megatrons = (
        median(point.value for point in events.Scalars(tag))
        for tag in ("optimus-cc/iteration seconds", "iteration-time")
    )
    assert 0.5 * megatrons < seconds < 2 * megatrons and float(found[1]) == pytest.approx(seconds, rel=0.01)
    assert events.Scalars("optimus-cc/memory bytes")[-1].value > 0


@uses(REPORTED)
def test_the_lines_for_the_terminal_say_all_of_it(runs):
    traffic, compression, statistics = reports(runs)[-1].lines()
    assert traffic.startswith("traffic per iteration | pipeline forward: ")
    assert (
        "pipeline backward low-rank: error " in compression
        and " | DP gradients low-rank: error " in compression
        and " ms" in compression
    )
    assert statistics.startswith("errors against activation differences | stage 1: cosine ")
