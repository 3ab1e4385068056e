"""The quickstart's parts that need no training: reading logs and events, the comparison, its pages, its folders."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from optimus_cc_ext.data import DataError, PreparedData
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.metrics.traffic import TrafficClass
from optimus_cc_ext.quickstart import QuickstartError, Settings
from optimus_cc_ext.quickstart.event_log import Curve, Record, read_record
from optimus_cc_ext.quickstart.log_lines import Progress, failure_reason, parse_progress, parse_techniques
from optimus_cc_ext.quickstart.page import build_page
from optimus_cc_ext.quickstart.pictures import draw, save_png, svg_data_uri
from optimus_cc_ext.quickstart.report import Outcome, Run, cross_check, render, shares, summarize, time_remark
from optimus_cc_ext.quickstart.settings import check_flags, check_text, remarks
from optimus_cc_ext.quickstart.workspace import PICTURES, claim

RAW = {
    TrafficClass.PIPELINE_FORWARD: 2_097_152,
    TrafficClass.PIPELINE_BACKWARD: 2_097_152,
    TrafficClass.DP_GRADIENTS: 50_796_544,
    TrafficClass.EMBEDDING: 33_554_432,
}
SENT = {
    TrafficClass.PIPELINE_FORWARD: 2_097_152,
    TrafficClass.PIPELINE_BACKWARD: 1_605_632,
    TrafficClass.DP_GRADIENTS: 5_000_000,
    TrafficClass.EMBEDDING: 25_165_824,
}


def write_events(folder: Path, losses: list[float], sent: dict[TrafficClass, int], skip: str = "") -> None:
    """Events as Megatron and our hook write them, through the same writer."""
    writer = SummaryWriter(str(folder))

    def scalar(tag: str, value: float, iteration: int) -> None:
        if tag != skip:
            writer.add_scalar(tag, value, iteration)

    for iteration, loss in enumerate(losses, start=1):
        scalar("lm loss", loss, iteration)
        if iteration > 1:
            scalar("iteration-time", 0.5 if iteration < len(losses) else 9.0, iteration)
        if iteration % 2 == 0:
            scalar("lm loss validation", loss + 0.25, iteration)
        for traffic_class in TrafficClass:
            scalar(f"optimus-cc/{traffic_class.value} raw bytes", RAW[traffic_class], iteration)
            scalar(f"optimus-cc/{traffic_class.value} sent bytes", sent[traffic_class], iteration)
    scalar("lm loss validation", losses[-1] + 0.5, len(losses))
    writer.close()


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    write_events(tmp_path / "vanilla", [8.0, 7.0, 6.0, 5.0], RAW)
    write_events(tmp_path / "compressed", [8.0, 7.0, 6.25, 5.5], SENT)
    runs = {
        name: Run(read_record(tmp_path / name), f"torchrun {name}", f"{name} <techniques>", 90.0)
        for name in ("vanilla", "compressed")
    }
    data = PreparedData(tmp_path / "corpus", tmp_path / "tokenizer", 4096, 600, 3_000_000, 10_000_000, False)
    return Outcome(replace(Settings(), iterations=4), ("A <remark>.",), "my <text> & more", data, 12.0, runs)


def with_traffic(record: Record, traffic_class: TrafficClass, raw: float) -> Record:
    curves = record.traffic[traffic_class]
    changed = replace(curves, raw=Curve(curves.raw.iterations, (raw,) * len(curves.raw.values)))
    return replace(record, traffic=record.traffic | {traffic_class: changed})


# -- TensorBoard events ---------------------------------------------------------------------------------------------


def test_events_are_read_back_without_the_validation_that_megatron_may_lose(outcome: Outcome) -> None:
    record = outcome.compressed
    assert record.training == Curve((1, 2, 3, 4), (8.0, 7.0, 6.25, 5.5))
    # Megatron validates at iteration 4 twice: within training (5.75) and, not always written, after it (6.0).
    assert record.validation == Curve((2, 4), (7.25, 5.75))
    assert record.median_seconds == 0.5, "one slow iteration must not show"
    assert record.traffic[TrafficClass.DP_GRADIENTS].sent_per_iteration == 5_000_000


@pytest.mark.parametrize("tag", ["lm loss", "optimus-cc/embedding sent bytes"])
def test_a_missing_scalar_is_named(tmp_path: Path, tag: str) -> None:
    write_events(tmp_path, [8.0, 7.0], RAW, skip=tag)
    with pytest.raises(QuickstartError, match=f"no scalar '{tag}'"):
        read_record(tmp_path)


def test_a_run_that_wrote_nothing_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(QuickstartError, match="there: none"):
        read_record(tmp_path)


# -- the comparison -------------------------------------------------------------------------------------------------


def test_shares_are_per_iteration_and_end_with_their_sum(outcome: Outcome) -> None:
    *classes, everything = shares(outcome.compressed)
    assert [share.name for share in classes] == [name.value for name in TrafficClass]
    assert [share.raw for share in classes] == list(RAW.values())
    assert (everything.raw, everything.sent) == (sum(RAW.values()), sum(SENT.values()))
    assert everything.ratio == sum(SENT.values()) / sum(RAW.values())


def test_consistent_runs_pass_the_cross_check(outcome: Outcome) -> None:
    assert cross_check(outcome.vanilla, outcome.compressed) == []
    assert summarize(outcome)["comparison"]["raw_equals_what_vanilla_sent"] is True


def test_raw_bytes_that_differ_from_what_vanilla_sent_are_said_loudly(outcome: Outcome) -> None:
    # 4 bytes in 50 MB: one value more than vanilla.
    wrong = with_traffic(outcome.compressed, TrafficClass.DP_GRADIENTS, RAW[TrafficClass.DP_GRADIENTS] + 4)
    runs = {**outcome.runs, "compressed": replace(outcome.runs["compressed"], record=wrong)}
    outcome = replace(outcome, runs=runs)
    (complaint,) = cross_check(outcome.vanilla, outcome.compressed)
    assert "DP gradients" in complaint and "50,796,548" in complaint
    assert "CROSS-CHECK FAILED" in text_of(outcome)
    assert "Cross-check failed" in build_page(outcome, dict.fromkeys(PICTURES, "data:,"))
    assert summarize(outcome)["comparison"]["complaints"] == [complaint]


def text_of(outcome: Outcome, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(outcome))
    return console.export_text()


def test_the_tables_fit_80_columns_and_hold_the_numbers(outcome: Outcome) -> None:
    text = text_of(outcome)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for number in ("5.0000", "5.5000", "+10.00%", "5.7500", "+9.52%", "50.797", "5.000", "9.8%", "75.0%", "38.3%"):
        assert number in text, number


def test_a_slower_iteration_is_admitted(outcome: Outcome) -> None:
    assert "as long either way" in time_remark(outcome)
    slow = replace(outcome.compressed, seconds=Curve((2, 3, 4), (0.6, 0.6, 0.6)))
    runs = {**outcome.runs, "compressed": replace(outcome.runs["compressed"], record=slow)}
    assert "does not pay here: an iteration takes 20% longer" in time_remark(replace(outcome, runs=runs))


def test_the_summary_is_json_with_losses_traffic_times_and_versions(outcome: Outcome) -> None:
    summary = json.loads(json.dumps(summarize(outcome)))
    compressed = summary["runs"]["compressed"]
    assert compressed["training_loss"]["values"] == [8.0, 7.0, 6.25, 5.5]
    assert compressed["traffic_bytes"]["DP gradients"]["sent"] == [5_000_000] * 4
    assert compressed["seconds_per_iteration"]["median"] == 0.5
    assert summary["comparison"]["final_validation_loss"] == {"vanilla": 5.25, "compressed": 5.75}
    assert summary["seconds"]["total"] == 192.0
    assert {"torch", "megatron-core", "python"} <= summary["versions"].keys()


# -- page and pictures ----------------------------------------------------------------------------------------------


def test_the_page_is_one_file_and_what_the_user_gave_is_escaped(outcome: Outcome) -> None:
    figures = draw(outcome)
    page = build_page(outcome, {name: svg_data_uri(figure) for name, figure in figures.items()})
    assert page.count('src="data:image/svg+xml;base64,') == len(PICTURES)
    for outside in ("http:", "https:", "<script", "<link", "@import", "url("):
        assert outside not in page, outside
    assert "my &lt;text&gt; &amp; more" in page and "&lt;techniques&gt;" in page and "&lt;remark&gt;" in page


def test_pictures_are_saved_as_png_without_overlapping_the_edges(outcome: Outcome, tmp_path: Path) -> None:
    figures = draw(outcome)
    assert tuple(figures) == PICTURES
    for name, figure in figures.items():
        save_png(figure, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
        inside = figure.get_tightbbox().get_points()
        # The layout is solved to a pixel or so: 0.02 inch is 3 pixels.
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


def test_iterations_and_validations_are_recognised_in_megatrons_log() -> None:
    assert parse_progress(ITERATION) == Progress(11, 7.049651, 1.2698)
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


# -- settings and text ----------------------------------------------------------------------------------------------


def test_vanilla_gets_none_of_our_flags_and_further_flags_win_in_the_compressed_run() -> None:
    settings, further = Settings(), ["--compressed-backprop-messages", "all", "--dp-compression-rank", "4"]
    assert settings.technique_flags("vanilla", further) == []
    config = check_flags(settings, further)
    assert config.compressed_backprop and config.fused_embedding_sync and config.dp_compression
    assert (config.compressed_backprop_messages, config.dp_compression_rank) == ("all", 4)
    assert config.compressed_backprop_rank == settings.backprop_rank


@pytest.mark.parametrize(("iterations", "interval"), [(160, 16), (100, 10), (25, 5), (101, 101), (3, 1)])
def test_the_last_validation_is_at_the_end(iterations: int, interval: int) -> None:
    assert replace(Settings(), iterations=iterations).evaluation_interval == interval


@pytest.mark.parametrize(("hidden", "deviation"), [(256, 0.0625), (64, 0.125)])
def test_weights_start_from_a_deviation_of_one_over_the_root_of_the_hidden_size(hidden: int, deviation: float) -> None:
    data = PreparedData(Path("corpus"), Path("tokenizer"), 4096, 600, 3_000_000, 10_000_000, False)
    # With Megatron's 0.02 so narrow a model takes steps of a hundred times the usual gradient norm.
    flags = replace(Settings(), hidden=hidden).megatron_flags(data, Path("events"))
    assert float(flags[flags.index("--init-method-std") + 1]) == pytest.approx(deviation, rel=1e-3)


def test_a_departure_from_the_papers_setting_is_said_unless_it_is_taken_back() -> None:
    settings = Settings()
    assert any("is dropped, not carried" in remark for remark in remarks(settings, check_flags(settings, [])))
    config = check_flags(settings, ["--residual-across-iterations", "carry"])
    assert config.residual_across_iterations == "carry"
    assert not any("dropped" in remark for remark in remarks(settings, config))


def test_bad_further_flags_are_refused_before_anything_runs() -> None:
    with pytest.raises(FlagError, match="--dp-compression-rank"):
        check_flags(Settings(), ["--dp-compression-rank", "0"])
    with pytest.raises(QuickstartError, match="--lr: not an Optimus-CC flag"):
        check_flags(Settings(), ["--lr", "1"])


def test_a_text_without_a_validation_part_is_refused() -> None:
    data = PreparedData(Path("corpus"), Path("tokenizer"), 4096, 600, 3_000_000, 10_000_000, False)
    check_text(Settings(), data)
    with pytest.raises(QuickstartError, match="3 documents"):
        check_text(Settings(), replace(data, documents=3))
    with pytest.raises(QuickstartError, match="500 tokens"):
        check_text(Settings(), replace(data, tokens=500))


# -- folders --------------------------------------------------------------------------------------------------------


def test_an_output_belongs_to_one_quickstart_at_a_time(tmp_path: Path) -> None:
    with claim(tmp_path / "out", Path("/usr")):
        with (
            pytest.raises(QuickstartError, match=rf"process {os.getpid()}\) is writing to .*out"),
            claim(tmp_path / "out", Path("/usr")),
        ):
            pass
        with claim(tmp_path / "other", Path("/usr")):
            pass
    with claim(tmp_path / "out", Path("/usr")):
        pass


def test_only_a_process_number_is_repeated_from_the_lock_file(tmp_path: Path) -> None:
    with claim(tmp_path / "out", Path("/usr")):
        (tmp_path / ".out.lock").write_text("ask me no questions")
        with pytest.raises(QuickstartError, match=r"process unknown\)"), claim(tmp_path / "out", Path("/usr")):
            pass


def test_what_an_unfinished_run_left_is_removed_and_finished_results_stay_until_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "summary.json").write_text("old")
    with claim(output, Path("/usr")) as workspace:
        (workspace.run_folder("vanilla") / "log.txt").write_text("half")
    with claim(output, Path("/usr")) as workspace:
        assert not workspace.unfinished.exists()
        workspace.run_folder("vanilla")
        (workspace.unfinished / "summary.json").write_text("new")
        assert (output / "summary.json").read_text() == "old"
        workspace.publish()
    assert (output / "summary.json").read_text() == "new" and (output / "vanilla").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out"]


def test_a_folder_with_something_else_in_it_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match=r"thesis\.tex"), claim(tmp_path, Path("/usr")):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "precious"
