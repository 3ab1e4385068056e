"""`optimus-cc plan` refuses what no plan can be made of, in one line, and never answers from a number that is none."""

from pathlib import Path

import pytest

from optimus_cc_ext.tools import cli

pytestmark = pytest.mark.ci

PLAN = ["plan", "--cluster", "h100-100gbe", "--nodes", "8", "--model", "llama3-8b"]
LAYOUT = ["--", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a command is refused."""
    assert cli.main(words) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("error: ") and not said.out
    return line


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "0", "-1"])
def test_seconds_that_are_no_number_calibrate_nothing(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--seconds: {seconds} is not a positive number" in refused([*PLAN, f"--seconds={seconds}", *LAYOUT], capsys)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"gpu": "H100", "network": "ndr8", "node_rate": NaN}', "node_rate: nan is not a positive number"),
        ('{"gpu": "H100", "network": "ndr8", "memory": Infinity}', "memory: inf is not a positive number"),
        ('{"gpu": "H100", "network": "own", "node_rate": 1e9, "hop": NaN}', "hop: nan is not a positive number"),
        ('["H100", "ndr8"]', "A cluster file contains"),
        ('{"gpu": ["H100"], "network": "ndr8"}', "A cluster file contains"),
        ("", "A cluster file contains"),
    ],
)
def test_a_cluster_file_with_what_is_no_number_is_refused(
    content: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.json").write_text(content)
    words = ["plan", "--cluster", str(tmp_path / "cluster.json"), "--nodes", "8", "--model", "llama3-8b", *LAYOUT]
    assert reason in refused(words, capsys)


def test_a_folder_without_logs_is_refused_whatever_else_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for further in ([], LAYOUT):
        said = refused([*PLAN, "--from", str(tmp_path), *further], capsys)
        assert f"--from {tmp_path}: a folder without logs" in said


def test_a_sweep_whose_range_goes_down_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nodes=8..4: not a range" in refused([*PLAN, "--sweep", "nodes=8..4", *LAYOUT], capsys)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--optimus-cc", "nonsense"], "--optimus-cc: invalid choice: 'nonsense'"),
        (["--optimus-cc", "balanced", "--dp-compression-format", "int3"], "invalid choice: 'int3'"),
        (["--message-memory", "much"], "--message-memory: "),
        (["--hidden-size", "1e4"], "--hidden-size: 1e4 is not a positive whole number"),
    ],
)
def test_a_flag_with_a_wrong_value_is_refused_without_a_page_of_usage(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refused([*PLAN, *LAYOUT, *flags], capsys)
