"""Summary of a run in one line: means over all iterations, the median of the seconds, and what a trial compared."""

import pytest

from optimus_cc_ext.config.classes import DP_GRADIENTS, PARAM_GATHER
from optimus_cc_ext.metrics.report import Report
from optimus_cc_ext.metrics.summary import Compared, Summary

ENDS = (
    "; 300.0 of 900.0 MB (33.3 %) sent in each, 90.0 of 400.0 MB (22.5 %) between nodes; "
    "up to 319.0 MB of memory on a rank"
)


def summary(nodes: bool = True) -> Summary:
    found = Summary()
    for iterations, seconds, share in ((10, 9.0, 1.0), (5, 1.0, 1.0), (15, 0.98, 1.0)):
        traffic = {DP_GRADIENTS: (6e8, share * 1e8), PARAM_GATHER: (3e8, 2e8)}
        leaving = (4e8, 9e7) if nodes else (0.0, 0.0)
        found.add(Report(traffic, (), leaving=leaving, memory=319_000_000, seconds={"iteration": seconds}), iterations)
    return found


@pytest.mark.parametrize(
    ("compared", "said"),
    [
        (None, ""),
        (Compared("balanced", 1.25, 0.9, True), ", 20 % less than 1.25 s dense in the trial"),
        (
            Compared("balanced", 1.25, 1.4, False),
            ", dense since the trial, in which balanced took 1.4 s, and dense 1.25 s",
        ),
    ],
)
def test_a_run_is_summed_up_in_seconds_bytes_and_memory(compared: Compared | None, said: str) -> None:
    assert summary().line(compared) == f"30 iterations: 1 s each{said}{ENDS}"


def test_reports_count_by_their_iterations_and_one_node_has_no_traffic_between_nodes() -> None:
    found = summary(nodes=False)
    found.add(Report({DP_GRADIENTS: (6e8, 6e8)}, (), seconds={"iteration": 1.0}), 20)
    assert "; 420.0 of 780.0 MB (53.8 %) sent in each; up to" in found.line(None)
