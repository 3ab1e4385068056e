"""A class whose error leaves the range that it had is named in the log, with the flag that turns it dense."""

import pytest

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.metrics.error_statistics import StatisticsSums
from optimus_cc_ext.metrics.report import FACTOR, ErrorAlarm, Report, StageMetrics, TechniqueMetrics


def report(error: float) -> Report:
    """Make a report of two stages whose gradients have the relative error `error`."""
    quiet = {each.tag: TechniqueMetrics() for each in CLASSES}
    stage = StageMetrics(
        1, quiet | {"DP gradients": TechniqueMetrics(error=error**2, compressed=1.0)}, StatisticsSums()
    )
    return Report({}, (stage, stage), {each.tag: "int4" for each in CLASSES})


def test_an_error_within_its_range_is_quiet_even_where_it_drifts() -> None:
    alarm = ErrorAlarm()
    assert [line for step in range(100) for line in alarm.lines(report(0.1 * 1.02**step))] == []


@pytest.mark.parametrize("error", [float("nan"), float("inf"), FACTOR * 0.11])
def test_one_that_leaves_it_is_named_with_the_way_out_every_time(error: float) -> None:
    alarm = ErrorAlarm()
    assert not list(alarm.lines(report(0.1)))
    for _ in range(2):
        (line,) = alarm.lines(report(error))
        assert line.startswith("warning | DP gradients: compression error ") and "usually 10.00 %" in line
        assert "--dp-compression-format dense" in line
    assert not list(alarm.lines(report(0.1))), "what was out of range does not become usual"


def test_a_first_error_that_is_not_finite_is_named_too() -> None:
    (line,) = ErrorAlarm().lines(report(float("nan")))
    assert "usually" not in line
