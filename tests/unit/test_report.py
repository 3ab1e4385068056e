"""Reading and showing runs: event files, logs, tables, pictures and the page."""

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.markdown import Markdown
from torch.utils.tensorboard import SummaryWriter

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.metrics.error_statistics import StatisticsSums
from optimus_cc_ext.metrics.report import Report, StageMetrics, TechniqueMetrics
from optimus_cc_ext.tools.report import ReportError, pictures
from optimus_cc_ext.tools.report.comparison import REQUIRED, Comparison
from optimus_cc_ext.tools.report.document import Box, Folded, Number, Picture, Points, ReportDocument
from optimus_cc_ext.tools.report.log_lines import (
    Progress,
    failure_reason,
    parse_left_dense,
    parse_progress,
    parse_techniques,
    without_prefix,
)
from optimus_cc_ext.tools.report.record import Curve, read_events, read_logs, shares
from optimus_cc_ext.tools.report.table import Table

RAW = {
    "pipeline forward": 2_097_152,
    "pipeline backward": 2_097_152,
    "expert dispatch": 8_388_608,
    "expert gradient": 8_388_608,
    "DP gradients": 50_796_544,
    "embedding": 33_554_432,
    "parameter gather": 4_194_304,
}
SENT = RAW | {
    "pipeline backward": 1_605_632,
    "expert dispatch": 4_194_304,
    "DP gradients": 5_000_000,
    "embedding": 25_165_824,
}


def write_events(folder: Path, losses: list[float], sent: Mapping[str, int], skip: str = "") -> Path:
    """Write events as Megatron and our hook do, through the same writer."""
    writer = SummaryWriter(str(folder))
    points = [("lm loss", loss, iteration) for iteration, loss in enumerate(losses, start=1)]
    for _, loss, iteration in list(points):
        points.append(("grad-norm", 1.5, iteration))
        if iteration > 1:
            points.append(("iteration-time", 0.5 if iteration < len(losses) else 9.0, iteration))
        if iteration % 2 == 0:
            points.append(("lm loss validation", loss + 0.25, iteration))
        points += [(f"optimus-cc/{name} raw bytes", RAW[name], iteration) for name in RAW]
        points += [(f"optimus-cc/{name} sent bytes", sent[name], iteration) for name in RAW]
    for point in [*points, ("lm loss validation", losses[-1] + 0.5, len(losses))]:
        if point[0] != skip:
            writer.add_scalar(*point)
    writer.close()
    return folder


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    vanilla = write_events(tmp_path / "vanilla", [8.0, 7.0, 6.0, 5.0], RAW)
    compressed = write_events(tmp_path / "compressed", [8.0, 7.0, 6.25, 5.5], SENT)
    return Comparison({folder.name: read_events(folder) for folder in (vanilla, compressed)}, first_is_vanilla=True)


def with_scalar(comparison: Comparison, tag: str, value: float) -> Comparison:
    """Return the comparison with another value of the compressed run at every iteration."""
    record = comparison.last
    scalars = record.scalars | {tag: dict.fromkeys(record.scalars[tag], value)}
    return replace(comparison, runs=comparison.runs | {"compressed": replace(record, scalars=scalars)})


# -- TensorBoard events ---------------------------------------------------------------------------------------------


def test_events_are_read_back_without_the_validation_that_megatron_may_lose(comparison: Comparison) -> None:
    record = comparison.last
    record.require(REQUIRED)
    assert record.training == Curve((1, 2, 3, 4), (8.0, 7.0, 6.25, 5.5))
    # Megatron validates at iteration 4 twice: within training (5.75) and, not always written, after it (6.0).
    assert record.validation == Curve((2, 4), (7.25, 5.75))
    assert record.seconds.median == 0.5, "one slow iteration must not show"
    assert record.sent("DP gradients").mean == 5_000_000


@pytest.mark.parametrize("tag", ["lm loss", "optimus-cc/embedding sent bytes"])
def test_a_missing_scalar_is_named(tmp_path: Path, tag: str) -> None:
    record = read_events(write_events(tmp_path, [8.0, 7.0], RAW, skip=tag))
    with pytest.raises(ReportError, match=f"no scalar '{tag}'"):
        record.require(REQUIRED)


# -- the comparison -------------------------------------------------------------------------------------------------


def test_consistent_runs_pass_the_cross_check_and_shares_end_with_their_sum(comparison: Comparison) -> None:
    *classes, everything = shares(comparison.last)
    assert [share.name for share in classes] == [traffic.tag for traffic in CLASSES]
    assert {share.name: share.raw for share in classes} == RAW
    assert (everything.raw, everything.sent) == (sum(RAW.values()), sum(SENT.values()))
    assert everything.ratio == sum(SENT.values()) / sum(RAW.values())
    assert comparison.complaints() == []
    assert comparison.summary()["raw_equals_what_vanilla_sent"] is True
    assert comparison.summary()["final_validation_loss"] == {"vanilla": 5.25, "compressed": 5.75}


@pytest.mark.full
def test_raw_bytes_that_differ_from_what_vanilla_sent_are_said_loudly(comparison: Comparison) -> None:
    # 4 bytes in 50 MB are one value more than vanilla sends.
    wrong = with_scalar(comparison, "optimus-cc/DP gradients raw bytes", RAW["DP gradients"] + 4)
    (complaint,) = wrong.complaints()
    assert "DP gradients" in complaint and "50,796,548" in complaint
    for text in (wrong.document("", "").html(), wrong.document("", "").markdown()):
        assert "Cross-check failed" in text and complaint in text
    assert wrong.summary()["complaints"] == [complaint]


def test_the_tables_fit_80_columns_and_hold_the_numbers(comparison: Comparison) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(
        *(Markdown(table.markdown()) for table in (comparison.losses(), comparison.times(), comparison.traffic()))
    )
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for number in ("5.0000", "5.5000", "+10.00%", "5.7500", "+9.52%", "50.797", "5.000", "9.8%", "75.0%", "46.2%"):
        assert number in text, number


def test_a_table_has_every_digit_in_csv_four_in_markdown_and_a_dash_for_what_is_not_known(tmp_path: Path) -> None:
    table = Table(
        ("name", "a|b"), [("x<y", 1234.5678), ("none", None), ("nan", float("nan")), ("small", 1.5e-7)], "T", "n"
    )
    table.write_csv(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().split() == [
        "name,a|b",
        "x<y,1234.5678",
        "none,",
        "nan,",
        "small,1.5e-07",
    ]
    lines = ["## T", "", "| name | a|b |", "|---|---:|", "| x<y | 1,235 |", "| none | - |", "| nan | - |"]
    assert table.markdown().splitlines() == [*lines, "| small | 1.500e-07 |", "", "n"]
    assert '<td>x&lt;y</td><td data-name="a|b">1,235</td>' in table.html()


# -- page and pictures ----------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_page_is_one_file_and_what_was_given_is_escaped(comparison: Comparison, tmp_path: Path) -> None:
    facts = {"a<b": "my <text> & more"}
    further = [Points.of(["A <remark>."]), Points([*facts.items()]), Folded("c<d", facts)]
    comparison.document("<title>", "<lead>", after=further).write(tmp_path, page="page.html")
    text = (tmp_path / "page.html").read_text()
    # Beside vanilla the page draws the difference alone, since its tables have the rest; no errors were logged.
    assert text.count('<svg role="img"') == text.count("Validation loss: difference</text>") == 1
    for outside in ("http:", "https:", "<script", "<link", "@import"):
        assert outside not in text, outside
    assert not re.search(r"url\((?!#)|href=\"(?!#)", text)
    assert text.count("my &lt;text&gt; &amp; more") == 2
    for escaped in ("<title>&lt;title", "&lt;lead", "&lt;remark", "a&lt;b", "c&lt;d"):
        assert escaped in text


def test_a_document_says_the_same_as_page_markdown_and_csv(tmp_path: Path) -> None:
    table = Table(("name", "value"), [("a", 1.5)], "A table", "A note.", name="values")
    further = Table(("name",), [("b",)], name="further")
    parts = [
        Box("A box", ["A sentence.", Points([("key", "said")], "Below.")]),
        Box("", [table, Picture("drawn", pictures.curves("Curve", "s", {"c": Curve((1, 2), (1.0, 2.0))}), "1 s")]),
        Box("", [Number("times", "2.00", "as fast")], "grid"), Folded("Commands", {"vanilla": "run it"}),
    ]  # fmt: skip
    document = ReportDocument("A title", "A lead.", parts, files=[further])
    document.write(tmp_path / "out", page="index.html", markdown="report.md")
    files = {"index.html", "report.md", "values.csv", "further.csv", "drawn.png", "drawn.svg", "drawn.pdf"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    page, text = ((tmp_path / "out" / name).read_text() for name in ("index.html", "report.md"))
    said = ("A title", "A lead.", "A box", "A sentence.", "key", "said", "Below.", "A table", "A note.", "1.5",
            "1 s", "2.00", "times", "as fast", "Commands", "vanilla", "run it")  # fmt: skip
    for words in said:
        assert words in page and words in text, words
    assert '<h2>A table</h2><table class="stack">' in page and page.count("A table") == text.count("A table") == 1
    assert "b\n" not in text, "a table among `files` is a CSV and no more"
    assert (tmp_path / "out" / "further.csv").read_text().split() == ["name", "b"]
    assert (tmp_path / "out" / "values.csv").read_text().split() == ["name,value", "a,1.5"]


@pytest.mark.full
def test_pictures_are_saved_as_png_svg_and_pdf_without_overlapping_the_edges(
    comparison: Comparison, tmp_path: Path
) -> None:
    figures = {
        "losses": pictures.loss_curves("Loss", {n: run.training for n, run in comparison.runs.items()}),
        "long names": pictures.loss_difference(
            "Loss", {f"{n} of seed 1, again": r.training for n, r in comparison.runs.items()}, band=0.0012
        ),
        "gain": pictures.gain(
            comparison.seconds(),
            {n: run.validation for n, run in comparison.runs.items()},
            {n: shares(run) for n, run in comparison.runs.items()},
            None,
        ),
    }
    for name, figure in figures.items():
        Picture(name, figure, "in words").save(tmp_path)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
        inside = figure.get_tightbbox().get_points()
        # matplotlib places the layout within about a pixel: 0.02 inch are 3 pixels
        fits = (inside >= -0.02).all() and (inside <= figure.get_size_inches() + 0.02).all()
        assert fits, f"{name} is cut off"


# -- logs -----------------------------------------------------------------------------------------------------------

ITERATION = (
    " [2026-01-01 06:08:53.7] iteration       11/      12 | consumed samples:          352 | elapsed time per"
    " iteration (ms): 1269.8 | learning rate: 8.000000E-04 | global batch size:    32 | lm loss: 7.049651E+00 |"
    " loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
VALIDATION = (
    " validation loss at iteration 12 on validation set | lm loss value: 6.940971E+00 | lm loss PPL: 1.0E+03 | "
)
KILLED = """\
 [2026-01-01 06:08:53.7] iteration       11/      12 | ...
E0101 06:14:40.1 29575 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: -9) local_rank: 3
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 29658)  (SIGTERM)
  traceback : Signal 15 (SIGTERM) received by PID 29658
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 29687)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 29687
"""
RAISED = """\
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:4242
[rank2]: Traceback (most recent call last):
[rank2]: KeyError: 'first'
[rank2]: ValueError: found NaN in local forward loss calculation
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 29687)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


@pytest.mark.parametrize(
    "prefix",
    [
        "3: ", "  0: ", "[default0]:", "[trainer12]:", "[1,31]<stdout>:", "[1,0]<stderr>: ",
        "[prterun-node1-2761@1,0]<stdout>: ", "Mon Jan  5 10:00:00 2026[1,0]<stdout>:", "<stdout>:",
        "2026-01-20T08:33:58.123456789Z ", "2026-01-20T08:33:58+01:00 stdout F ", "[2026-01-20 08:33:58,123] ",
        "[0] ", "[pod/train-worker-0/pytorch] ", "(WorkerDict pid=123, ip=10.0.0.1) ", "(pid=7) ",
        "node-01.cluster: ", "worker-0: ", "trainer-1  | ", "\x1b[36mtrainer-1  | \x1b[0m", "\ufeff",
        "2026-01-20T08:33:58Z  0: [default0]:",
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["", "\r\n"])
def test_what_a_launcher_writes_in_front_of_a_line_is_stripped(prefix: str, end: str) -> None:
    left = "optimus-cc: left dense, because nothing of it leaves a node: tokens"
    for line in (
        "  num_layers ...... 4",
        "# Rank  0 Group  0",
        "           8       2  float",
        "[rank3]: Error: no",
        left,
    ):
        assert without_prefix(prefix + line + end).strip() == line.strip()
    assert parse_left_dense(prefix + left + end) == "tokens"
    assert (
        parse_techniques(f"{prefix}optimus-cc: everything is off on megatron-core 0.19.2{end}") == "everything is off"
    )


@pytest.mark.parametrize(
    "line", ["optimus-cc: on", "ValueError: no", "error: 1", "stage 3: cosine 0.1", "  12 3  float", "[rank12]: a"]
)
def test_what_a_program_printed_itself_stays(line: str) -> None:
    assert without_prefix(line) == line


def test_iterations_and_validations_are_recognised_in_megatrons_log() -> None:
    assert parse_progress(ITERATION) == Progress(11, 7.049651, 1.2698, gradient_norm=1.0)
    assert parse_progress(VALIDATION) == Progress(12, 6.940971)
    assert parse_progress("  optimus-cc traffic per iteration | DP gradients: 1.0 of 2.0 MB (50.0 %)") is None
    assert parse_techniques("optimus-cc: every technique is off on megatron-core 0.19.2") == "every technique is off"
    assert parse_techniques("optimus-cc: running on CPU over gloo (OPTIMUS_CC_DEVICE=cpu)") is None


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (KILLED, "rank 3 was ended by Signal 9 (SIGKILL)"),
        (RAISED, "rank 2: ValueError: found NaN in local forward loss calculation"),
        ("optimus-cc: error: --optimus-cc: no.\n" + RAISED, "--optimus-cc: no."),
        ("pretrain_gpt.py: error: unrecognized arguments: --typo\n" + RAISED, "unrecognized arguments: --typo"),
        ("nothing known\n", None),
    ],
    ids=["a rank was killed", "the first rank's exception", "our refusal", "argparse's refusal", "unknown"],
)
def test_the_reason_of_a_failure_is_found_in_the_log(log: str, reason: str | None) -> None:
    assert failure_reason(log.splitlines()) == reason


VALIDATIONS = """\
 validation loss at iteration 4 | lm loss value: 5.0E+00 | lm loss PPL: 1.484132E+02 |
 validation loss at iteration 8 | lm loss value: 4.0E+00 | lm loss PPL: 5.459815E+01 |
 validation loss at iteration 8 on validation set | lm loss value: 4.5E+00 | lm loss PPL: 9.001713E+01 |
 validation loss at iteration 8 on test set | lm loss value: 3.0E+00 | lm loss PPL: 2.008554E+01 |
 validation loss at iteration 9 on test set | lm loss value: 3.0E+00 | lm loss PPL: 2.008554E+01 |
"""


def test_the_validation_losses_of_a_log_are_those_within_training(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(VALIDATIONS)
    assert read_logs(tmp_path).validation == Curve((4, 8), (5.0, 4.0))


@pytest.mark.parametrize("label", ["", "1: "], ids=["a log", "a log with the numbers of nodes, as srun --label writes"])
def test_a_log_and_an_event_file_give_the_same_traffic_under_the_same_tags(label: str, tmp_path: Path) -> None:
    report = Report({traffic: (RAW[traffic.tag], SENT[traffic.tag]) for traffic in CLASSES}, ())
    lines = [ITERATION, *(f"  optimus-cc {line}" for line in report.lines())]
    (tmp_path / "log-node0.txt").write_text("\n".join(label + line for line in lines))
    record = read_logs(tmp_path)
    assert record.seconds == Curve((11,), (1.2698,))
    scalars = {tag: {11: pytest.approx(value, rel=1e-3)} for tag, value in report.scalars().items()}
    assert {tag: points for tag, points in record.scalars.items() if tag.startswith("optimus-cc")} == scalars


def test_every_report_of_the_log_repeats_where_and_why_torch_compresses() -> None:
    where = "Triton's kernels do not work on rank 9 on node3 (Triton is not installed) and on 2 more"
    assert not any("torch" in line for line in Report({}, ()).lines())
    assert list(Report({}, (), fallback=where).lines())[-1] == f"compressed by torch | {where}"


def test_a_log_keeps_the_error_and_the_time_of_every_class_that_the_log_names(tmp_path: Path) -> None:
    measured = {
        traffic.tag: TechniqueMetrics(error=number / 100, compressed=1.0, seconds=number / 1000)
        for number, traffic in enumerate(CLASSES, start=1)
    }
    stage = StageMetrics(ranks=1, techniques=measured, statistics=StatisticsSums())
    report = Report({}, (stage,), dict.fromkeys(measured, "int4"))
    (tmp_path / "log.txt").write_text("\n".join([ITERATION, *(f"  optimus-cc {line}" for line in report.lines())]))
    scalars = read_logs(tmp_path).scalars
    for title, technique in measured.items():
        assert scalars[f"optimus-cc/{title} relative error"] == {11: pytest.approx(technique.relative_error, abs=1e-4)}
        assert scalars[f"optimus-cc/{title} milliseconds"] == {11: pytest.approx(1e3 * technique.seconds)}
