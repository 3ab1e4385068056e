"""`optimus-cc report` on one run, on two runs, on runs of Megatron alone, and on folders without a run."""

import csv
import os
from html import escape
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from optimus_cc_ext import cli
from optimus_cc_ext.metrics.report import Report
from optimus_cc_ext.metrics.traffic import FALLBACK
from optimus_cc_ext.report.comparison import FILES
from optimus_cc_ext.report.record import SECONDS, TRAINING, VALIDATION, read_events

CLASSES = {"DP gradients": (4e6, 1e6), "pipeline forward": (1e6, 5e5)}


def write_run(folder: Path, *, ours: bool = True, first: int = 1, last: int = 6, loss: float = 8.0) -> Path:
    """Write events as Megatron and our hook do, through the same writer; return the file."""
    before = set(folder.glob("*"))
    writer = SummaryWriter(str(folder))
    for iteration in range(first, last + 1):
        writer.add_scalar(TRAINING, loss - 0.1 * iteration, iteration)
        writer.add_scalar(VALIDATION, loss - 0.1 * iteration + 0.5, iteration)
        writer.add_scalar(SECONDS, 0.5, iteration)
        for name, (raw, sent) in CLASSES.items() if ours else ():
            writer.add_scalar(f"optimus-cc/{name} raw bytes", raw, iteration)
            writer.add_scalar(f"optimus-cc/{name} sent bytes", sent, iteration)
        if ours:
            writer.add_scalar("optimus-cc/CB relative error/stage 1", 0.25, iteration)
            writer.add_scalar("optimus-cc/CB milliseconds/stage 1", 3.0, iteration)
    writer.close()
    (file,) = set(folder.glob("*")) - before
    return file


def report(*words: Path | str) -> int:
    return cli.main(["report", *map(str, words)])


LOGGED = (
    " [2026-11-25 12:00:00] iteration        1/      10 | consumed samples:            8 | elapsed time per iteration "
    "(ms): 500.0 | learning rate: 1.0E-03 | global batch size:     8 | lm loss: 8.0E+00 | grad norm: 1.0 |"
)
WHERE = "Triton's kernels do not work on rank 9 on node3 (Triton is not installed) and on 2 more"


@pytest.mark.ci
def test_the_page_of_a_run_says_that_torch_compressed_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "events")
    assert report(tmp_path / "events", "--output", tmp_path / "with kernels") == 0
    assert "compressed by torch" not in (tmp_path / "with kernels" / "index.html").read_text()
    with SummaryWriter(str(tmp_path / "events")) as writer:  # as in training, where our event file is not the last one
        writer.add_scalar(TRAINING, 7.0, 7)
        writer.add_text(FALLBACK, WHERE, 7)
    (tmp_path / "log").mkdir()
    line = next(line for line in Report({}, (), fallback=WHERE).lines() if "torch" in line)
    (tmp_path / "log" / "log.txt").write_text(f"{LOGGED}\n  optimus-cc {line}\n")
    capsys.readouterr()
    for run in ("events", "log"):
        assert report(tmp_path / run, "--output", tmp_path / f"{run} page") == 0
        said = f"{run}: compressed by torch, which takes longer: {WHERE}"
        assert f"note: {said}" in capsys.readouterr().out
        assert escape(said) in (tmp_path / f"{run} page" / "index.html").read_text()


def test_two_runs_side_by_side_are_a_page_tables_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a" / "tensorboard")
    write_run(tmp_path / "b" / "tensorboard", loss=9.0)
    output = tmp_path / "out"
    assert report(tmp_path / "a", tmp_path / "b", "--output", output) == 0
    assert {path.name for path in output.iterdir()} == {"index.html", *FILES}
    said = capsys.readouterr().out
    for line in ("final training loss", "+13.51%", "| DP gradients | 4.000 | 1.000 | 25.0% |", "CB, stage 1"):
        assert line in said, line
    assert "note:" not in said, "two compressed runs contradict nothing"
    rows = list(csv.DictReader((output / "compression.csv").open()))
    assert rows == [{"": "CB, stage 1"} | {f"{run}: {kind}": value for run in "ab" for kind, value in (
        ("error, %", "25.0"), ("ms", "3.0"),
    )}]  # fmt: skip
    assert sum(row["scalar"] == TRAINING for row in csv.DictReader((output / "scalars.csv").open())) == 2 * 6
    # A report of one run replaces an earlier report of two runs in the same folder.
    assert report(tmp_path / "a", "--output", output) == 0
    assert "difference" not in (output / "index.html").read_text() and not (output / "gain.png").exists()


def test_a_run_of_megatron_alone_is_reported_without_traffic_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "plain", ours=False)
    write_run(tmp_path / "ours")
    for folders in ([tmp_path / "plain"], [tmp_path / "plain", tmp_path / "ours"]):
        assert report(*folders, "--output", tmp_path / "out") == 0
        assert "plain: no traffic and no errors (vanilla Megatron does not count them" in capsys.readouterr().out
        assert "no traffic and no errors" in (tmp_path / "out" / "index.html").read_text()


def test_where_there_are_only_logs_as_of_the_papers_runs_these_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        f" iteration {i}/ 4 | consumed samples: 8 | elapsed time per iteration (ms): 500.0 | lm loss: 7.5E+00 |\n"
        "  optimus-cc traffic per iteration | DP gradients: 1.000 of 4.000 MB (25.0 %)\n"
        "  optimus-cc compression | SC low-rank: error 40.00 %, residual norm 1.0e+00, 3.00 ms | gather int4: error "
        "12.00 % of a step's change, which the next step makes up, 5.00 ms\n"
        for i in range(1, 5)
    )
    (tmp_path / "log.txt").write_text("".join(lines))
    assert report(tmp_path, "--output", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "| final training loss | 7.5000 |" in said and "| DP gradients | 4.000 | 1.000 | 25.0% |" in said
    assert "| SC | 40 | 3 |" in said and "| gather | 12 | 5 |" in said and "no validation loss" in said


def test_a_resumed_run_is_one_run_and_its_later_file_counts(tmp_path: Path) -> None:
    earlier = write_run(tmp_path, last=6)
    later = write_run(tmp_path, first=5, last=8, loss=5.0)
    os.utime(earlier, (1, 1)), os.utime(later, (2, 2))
    curve = read_events(tmp_path).training
    assert curve.iterations == tuple(range(1, 9))
    assert curve.values[3] == pytest.approx(7.6) and curve.values[4] == pytest.approx(4.5)


def test_what_is_no_run_is_refused_by_the_files_name_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_run(tmp_path / "good").parent
    whole = write_run(tmp_path / "cut").read_bytes()
    (cut,) = (tmp_path / "cut").iterdir()
    write_run(tmp_path / "mixed"), write_run(tmp_path / "mixed")
    write_run(tmp_path / "several" / "one"), write_run(tmp_path / "several" / "two")
    write_run(tmp_path / "others", first=50, last=60)
    (tmp_path / "none").mkdir()
    empty = write_run(tmp_path / "empty", first=2, last=1)
    cases = [
        ([tmp_path / "none"], f"{tmp_path / 'none'}: no event files"),
        ([good, tmp_path / "absent"], f"{tmp_path / 'absent'}: no event files"),
        ([tmp_path / "mixed"], "starts at iteration 1, and events.out.tfevents"),
        ([tmp_path / "several"], f"in {tmp_path / 'several' / 'one'} and {tmp_path / 'several' / 'two'}"),
        ([good, tmp_path / "others"], "no iteration in common"),
        ([empty.parent], f"{empty}: no scalars"),
        ([good, good, good], "3 folders"),
    ]
    for folders, reason in cases:
        assert report(*folders, "--output", tmp_path / "out") == 2
        assert reason in capsys.readouterr().err
    # The file is cut within a header, a length, the data and the last checksum.
    for length in (3, 30, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        assert report(good, cut.parent, "--output", tmp_path / "out") == 2
        assert f"error: {cut}: the file ends in the middle of a record" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_in_it_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    assert report(tmp_path / "run", "--output", tmp_path / "out") == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert (tmp_path / "out" / "thesis.tex").exists()
