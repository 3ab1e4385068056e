"""`optimus-cc report` on one run, on two runs, on runs of Megatron alone, and on folders without a run."""

import csv
import math
import os
from html import escape
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from optimus_cc_ext.metrics.report import Report
from optimus_cc_ext.metrics.traffic import FALLBACK
from optimus_cc_ext.tools import cli
from optimus_cc_ext.tools.report.comparison import FILES
from optimus_cc_ext.tools.report.document import Picture
from optimus_cc_ext.tools.report.record import (
    NORM,
    OUR_SECONDS,
    SECONDS,
    TRAINING,
    VALIDATION,
    read_events,
    read_run,
)

pytestmark = pytest.mark.ci

CLASSES = {"DP gradients": (4e6, 1e6), "pipeline forward": (1e6, 5e5)}


def write_run(folder: Path, *, ours: bool = True, first: int = 1, last: int = 6, loss: float = 8.0) -> Path:
    """Write events as Megatron and our hook do, through the same writer; return the file."""
    before = set(folder.glob("*"))
    writer = SummaryWriter(str(folder))
    for iteration in range(first, last + 1):
        writer.add_scalar(TRAINING, loss - 0.1 * iteration, iteration)
        writer.add_scalar(VALIDATION, loss - 0.1 * iteration + 0.5, iteration)
        writer.add_scalar(SECONDS, 0.5, iteration)
        writer.add_scalar(NORM, 1.5, iteration)
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


@pytest.mark.full
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


@pytest.mark.ci
def test_two_runs_side_by_side_are_a_page_tables_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a" / "tensorboard")
    write_run(tmp_path / "b" / "tensorboard", loss=9.0)
    output = tmp_path / "out"
    assert report(tmp_path / "a", tmp_path / "b", "--output", output) == 0
    assert {path.name for path in output.iterdir()} == {"index.html", *FILES}
    said = capsys.readouterr().out
    for line in (
        "final training loss",
        "+13.51%",
        "| DP gradients | 4.000 | 1.000 | 25.0% |",
        "pipeline backward, stage 1",
    ):
        assert line in said, line
    assert "note:" not in said, "two compressed runs contradict nothing"
    rows = list(csv.DictReader((output / "compression.csv").open()))
    assert rows == [{"": "pipeline backward, stage 1"} | {f"{run}: {kind}": value for run in "ab" for kind, value in (
        ("error, %", "25.0"), ("ms", "3.0"),
    )}]  # fmt: skip
    assert sum(row["scalar"] == TRAINING for row in csv.DictReader((output / "scalars.csv").open())) == 2 * 6
    # A report of one run replaces an earlier report of two runs in the same folder.
    assert report(tmp_path / "a", "--output", output) == 0
    assert "difference" not in (output / "index.html").read_text() and not (output / "gain.png").exists()


@pytest.mark.full
def test_a_run_of_megatron_alone_is_reported_without_traffic_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "plain", ours=False)
    write_run(tmp_path / "ours")
    for folders in ([tmp_path / "plain"], [tmp_path / "plain", tmp_path / "ours"]):
        assert report(*folders, "--output", tmp_path / "out") == 0
        assert "plain: no traffic and no errors (vanilla Megatron does not count them" in capsys.readouterr().out
        assert "no traffic and no errors" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.full
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
    assert (
        "| DP gradients | 40 | 3 |" in said and "| parameter gather | 12 | 5 |" in said and "no validation loss" in said
    )


def test_a_resumed_run_is_one_run_and_its_later_file_counts_whatever_a_copy_made_of_the_files_times(
    tmp_path: Path,
) -> None:
    earlier = write_run(tmp_path, last=6)
    later = write_run(tmp_path, first=5, last=8, loss=5.0)
    for times in ((1, 2), (2, 1), (1, 1)):
        os.utime(earlier, (times[0],) * 2), os.utime(later, (times[1],) * 2)
        curve = read_events(tmp_path).training
        assert curve.iterations == tuple(range(1, 9))
        assert curve.values[3] == pytest.approx(7.6) and curve.values[4] == pytest.approx(4.5)


def logged(iteration: int, loss: float = 8.0, hour: int = 12) -> str:
    line = LOGGED.replace("       1/", f"{iteration:8d}/").replace("8.0E+00", f"{loss:E}")
    return line.replace("12:00:00", f"{hour}:00:00") + "\n"


def test_a_dead_attempt_gives_neither_the_last_figure_nor_one_that_a_later_attempt_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Iterations 1 to 12, then from the checkpoint after 8 on: once to 10, and again to 9, which is still running.
    attempts = ((range(1, 13), 8.0), (range(9, 11), 7.0), (range(9, 10), 6.0))
    for iterations, loss in attempts:
        with SummaryWriter(str(tmp_path / "events")) as writer:
            for iteration in iterations:
                writer.add_scalar("learning-rate", 0.1, iteration)
                writer.add_scalar(TRAINING, loss, iteration)
                writer.add_scalar(f"{TRAINING} vs samples", loss, 64 * iteration)
                if iteration % 2 == 0:
                    writer.add_scalar(VALIDATION, loss, iteration)
    record = read_events(tmp_path / "events")
    assert record.training.iterations == tuple(range(1, 10)) and record.training.values == (8.0,) * 8 + (6.0,)
    assert record.validation.iterations == (2, 4, 6, 8) and record.validation.last == 8.0
    assert record.curve(f"{TRAINING} vs samples").iterations == tuple(range(64, 577, 64))
    assert record.curve("learning-rate").iterations == record.training.iterations
    # The same in one event file, as a run that restarts within its process writes it, and in one log.
    with SummaryWriter(str(tmp_path / "one")) as writer:
        for iterations, loss in attempts:
            for iteration in iterations:
                writer.add_scalar(TRAINING, loss, iteration)
    log = tmp_path / "slurm-1.out"
    log.write_text("".join(logged(iteration, loss) for iterations, loss in attempts for iteration in iterations))
    for path in (tmp_path / "one", log):
        assert read_run(path).training == record.training
    # A log to which another start was appended is that start's.
    log.write_text(log.read_text() + logged(1))
    assert report(log, "--output", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "After 1 iterations" in said and "slurm-1.out: begins again at 1; what was before is left out" in said


@pytest.mark.parametrize("first", [pytest.param(3, marks=pytest.mark.full), 1], ids=["at the first start", "before it"])
def test_event_files_that_begin_again_are_the_last_starts_as_logs_are_and_that_is_said(
    first: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A run that died before its first checkpoint begins again; so does another experiment in the same folder.
    write_run(tmp_path / "run", first=3, last=9)
    again = write_run(tmp_path / "run", first=first, last=5, loss=5.0, ours=False)
    record = read_run(tmp_path / "run")
    assert record.training.iterations == tuple(range(first, 6)) and record.training.last == pytest.approx(4.5)
    assert "optimus-cc/DP gradients raw bytes" not in record.scalars
    write_run(tmp_path / "run", first=5, last=7, loss=4.0)  # a resumed part of the second start
    assert read_run(tmp_path / "run").training.iterations == tuple(range(first, 8))
    assert report(tmp_path / "run", "--output", tmp_path / "out") == 0
    said = f"{again.name}: begins again at {first}; what was before is left out"
    assert said in capsys.readouterr().out and said in (tmp_path / "out" / "index.html").read_text()
    # The same within one event file, by a process that starts anew.
    with SummaryWriter(str(tmp_path / "one")) as writer:
        for iteration in (3, 4, 5, first, first + 1):
            writer.add_scalar(TRAINING, 8.0, iteration)
    record = read_run(tmp_path / "one")
    assert record.training.iterations == (first, first + 1) and "begins again" in record.notes[0]


@pytest.mark.parametrize("name", ["slurm-1234.out", "train.log", "log.txt", "console"])
@pytest.mark.parametrize("prefix", ["", " 3: ", "[default7]:", "[1,31]<stdout>:", "2026-01-20T08:33:58.123456789Z "])
def test_a_log_is_read_under_any_name_alone_and_in_its_folder(name: str, prefix: str, tmp_path: Path) -> None:
    log = tmp_path / "run" / name
    log.parent.mkdir()
    log.write_text("".join(prefix + logged(iteration) for iteration in range(1, 9)))
    for given in [log] + [log.parent] * (name != "console"):
        assert read_run(given).training.iterations == tuple(range(1, 9))
    # A folder in which two files have the same lines, and a third one, of another name, goes on.
    (log.parent / "tee.log").write_text(log.read_text())
    (log.parent / "a.log").write_text(logged(7, 3.0, hour=13))
    record = read_run(log.parent)
    assert record.training.iterations == tuple(range(1, 8)) and record.training.last == 3.0


@pytest.mark.parametrize(("tag", "whose"), [
    ("reduced_train_loss", "NeMo's"), ("train/loss", "Hugging Face Trainer's"), ("train/lm_loss", "GPT-NeoX's"),
    ("lm-loss-training/lm loss", "Megatron-DeepSpeed's"), ("actor/pg_loss", "verl's"),
])  # fmt: skip
def test_tags_of_other_projects_are_named_as_theirs(
    tag: str, whose: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_scalar(tag, 1.0, 1)
    write_run(tmp_path / "good")
    for folders in ([tmp_path / "run"], [tmp_path / "good", tmp_path / "run"], [tmp_path / "run", tmp_path / "good"]):
        assert report(*folders, "--output", tmp_path / "out") == 2
        assert (
            f"{tmp_path / 'run'}: no scalar 'lm loss' (found: {tag}). These are {whose} tags" in capsys.readouterr().err
        )


def test_an_event_file_that_is_cut_or_damaged_is_read_up_to_its_last_whole_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_run(tmp_path / "cut").read_bytes()
    (cut,) = (tmp_path / "cut").iterdir()
    flipped = bytearray(whole)
    flipped[len(whole) * 3 // 4] ^= 1
    for content, last in (
        (whole[: len(whole) // 2], None), (whole[:-1], None), (bytes(flipped), None), (whole + bytes(40), 6),
        (whole + b"\x18", 6),
    ):  # fmt: skip
        cut.write_bytes(content)
        record = read_run(cut)
        assert record.training.iterations == tuple(range(1, len(record.training.iterations) + 1))
        assert len(record.training.iterations) == last if last else len(record.training.iterations) >= 2
        assert "records the file is cut off, damaged or still written" in "".join(record.notes)
    assert report(cut.parent, "--output", tmp_path / "out") == 0
    assert f"cut: {record.notes[0]}" in capsys.readouterr().out
    assert escape(record.notes[0]) in (tmp_path / "out" / "index.html").read_text()
    cut.write_bytes(whole)
    assert read_run(cut).notes == ()


def test_what_is_no_run_is_refused_by_the_files_name_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_run(tmp_path / "good").parent
    write_run(tmp_path / "several" / "one"), write_run(tmp_path / "several" / "two")
    write_run(tmp_path / "others", first=50, last=60)
    (tmp_path / "none").mkdir()
    empty = write_run(tmp_path / "empty", first=2, last=1)
    cases = [
        ([tmp_path / "none"], f"{tmp_path / 'none'}: no event files"),
        ([good, tmp_path / "absent"], f"{tmp_path / 'absent'}: no such file or folder"),
        ([tmp_path / "several"], f"in {tmp_path / 'several' / 'one'} and {tmp_path / 'several' / 'two'}"),
        ([good, tmp_path / "others"], "no iteration in common"),
        ([empty.parent], f"{empty}: no scalars"),
        ([good, good, good], "3 folders"),
    ]
    for folders, reason in cases:
        assert report(*folders, "--output", tmp_path / "out") == 2
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_in_it_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    assert report(tmp_path / "run", "--output", tmp_path / "out") == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_of_a_run_that_is_short_or_not_finite_the_report_says_what_is_missing_and_shows_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(picture: Picture) -> dict[str, bytes]:
        picture.figure.draw_without_rendering()
        return dict.fromkeys(("png", "svg", "pdf"), b"<svg></svg>")

    monkeypatch.setattr(Picture, "files", property(drawn))
    good = write_run(tmp_path / "good").parent
    empty, one, bad = tmp_path / "empty", tmp_path / "one", tmp_path / "bad"
    write_run(empty, first=2, last=1)
    with SummaryWriter(str(one)) as writer:
        writer.add_scalar(TRAINING, 8.0, 1)
        for name, both in CLASSES.items():
            for side, nbytes in zip(("raw", "sent"), both, strict=True):
                writer.add_scalar(f"optimus-cc/{name} {side} bytes", nbytes, 1)
    with SummaryWriter(str(bad)) as writer:
        for iteration, value in enumerate((5.0, 0.0, math.nan, math.inf, 4.0, 3.0), start=1):
            for tag in (TRAINING, VALIDATION, NORM):
                writer.add_scalar(tag, value, iteration)
            writer.add_scalar(OUR_SECONDS, 0.25, iteration)
    for folders, said in (
        ([good, empty], f"{next(empty.iterdir())}: no scalars"),
        ([empty, good], f"{next(empty.iterdir())}: no scalars"),
        ([good, one], "one: no validation loss"),
        ([one], "one: no validation loss"),
        ([good, bad], "bad: lm loss is not finite in 2 iterations, from 3 on"),
        ([bad, good], "bad: grad-norm is not finite in 2 iterations, from 3 on"),
    ):
        assert report(*folders, "--output", tmp_path / "out") == 0
        assert said in (out := capsys.readouterr().out) and "final training loss" in out
        assert escape(said) in (tmp_path / "out" / "index.html").read_text()
        assert ("| seconds per iteration | 0.250 |" in out) == (folders[0] == bad)
        assert "not runs of the same training" not in out, "a run that ended early is one of the same training"


def test_memory_and_the_trials_seconds_are_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    with SummaryWriter(str(tmp_path / "run")) as writer:
        for tag, value in (
            (TRAINING, 7.0),
            ("optimus-cc/memory bytes", 3.19e8),
            ("optimus-cc/dense trial seconds", 0.7),
        ):
            writer.add_scalar(tag, value, 7)
    assert report(tmp_path / "run", "--output", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "| MB of memory on a rank for compression | 319.0 |" in out
    assert "| dense seconds in the run's own trial | 0.700 |" in out


def test_gradient_norms_are_read_from_a_log(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(LOGGED + "\n")
    assert read_run(tmp_path).curve(NORM).values == (1.0,)


def test_iterations_that_were_skipped_are_said_to_have_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # bigscience-workshop/Megatron-DeepSpeed 396: a log without a loss, in which every gradient norm is NaN.
    skipped = LOGGED.replace("lm loss: 8.0E+00 | grad norm: 1.0", "loss scale: 1.0 | grad norm: nan")
    (tmp_path / "log.txt").write_text(f"{skipped}\n{skipped}\n")
    assert report(tmp_path, "--output", tmp_path / "out") == 2
    assert (
        f"{tmp_path}: 2 log lines of iterations have no loss: all were skipped, or it was not logged"
        in capsys.readouterr().err
    )
    (tmp_path / "log.txt").write_text(f"{skipped}\n{logged(20)}")
    record = read_run(tmp_path)
    assert record.training.iterations == (20,) and "1 log lines of iterations have no loss" in record.notes[0]
