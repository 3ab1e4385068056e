"""Logs of runs, kept here, are read: every value by its tag.

Each folder of logs_of_runs holds the lines that `optimus-cc report` looks for, from one run:
`MODEL=tiny TRAIN_ITERS=4 PIPELINE_PARALLEL=2 PROCESSES_PER_NODE=4 scripts/pretrain_gpt.sh --eval-interval 4`, once with
`--optimus-cc --compressed-backprop-messages all --compression-error-statistics`, once with `--bf16
--use-distributed-optimizer --optimus-cc balanced --dp-compression-stages all`.
"""

from pathlib import Path

import pytest

from optimus_cc_ext.tools.report.comparison import Comparison
from optimus_cc_ext.tools.report.log_lines import parse_techniques
from optimus_cc_ext.tools.report.record import Record, read_run

FOLDER = Path(__file__).parent / "logs_of_runs"
LAST = {
    "paper": {
        "lm loss": 6.248878,
        "lm loss validation": 6.239195,
        "iteration-time": 0.1296,
        "optimus-cc/pipeline backward sent bytes": 25e3,
        "optimus-cc/embedding raw bytes": 1049e3,
        "optimus-cc/pipeline backward relative error": 0.9397,
        "optimus-cc/DP gradients milliseconds": 1.89,
        "optimus-cc/error cosine/stage 1": 0.0009,
        "optimus-cc/error mean/stage 1": -3.07e-12,
        "optimus-cc/activation difference mean/stage 1": -5.62e-05,
        "compression state MB": 0.9,
        "max allocated MB/rank 2": 0.0,
    },
    "balanced": {
        "lm loss": 6.236869,
        "optimus-cc/pipeline forward sent bytes": 67e3,
        "optimus-cc/parameter gather raw bytes": 539e3,
        "optimus-cc/pipeline forward relative error": 0.0257,
        "optimus-cc/embedding milliseconds": 1.37,
        "optimus-cc/parameter gather relative error": 0.1144,
        "optimus-cc/parameter gather milliseconds": 10.77,
    },
}
"""The values of the last iteration that logged a tag, read off the logs by eye."""


@pytest.fixture(params=LAST)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def record(name: str) -> Record:
    return read_run(FOLDER / name)


def test_every_value_is_found_under_its_tag(name: str, record: Record) -> None:
    found = {tag: record.curve(tag).last for tag in LAST[name]}
    assert found == pytest.approx(LAST[name])


def test_every_iteration_and_every_class_are_in_the_report(name: str, record: Record) -> None:
    assert record.training.iterations == (1, 2, 3, 4)
    comparison = Comparison({name: record})
    assert comparison.missing() == [] and comparison.complaints() == []
    classes = 4 if name == "paper" else 5
    assert len(comparison.traffic().rows) == classes + 1, "each class, and the sum"


def test_the_techniques_are_read_from_their_line(name: str) -> None:
    found = [said for line in (FOLDER / name / "log.txt").read_text().splitlines() if (said := parse_techniques(line))]
    assert len(found) == 1 and found[0].endswith({"paper": "(rank 4, the first 2 stages)", "balanced": "(int4)"}[name])
