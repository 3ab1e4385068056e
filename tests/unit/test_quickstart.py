"""The quickstart's parts that need no training: its settings, its results, its folders."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from optimus_cc_ext.data import DataError, PreparedData
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.report.comparison import REQUIRED
from optimus_cc_ext.report.record import SECONDS, Record
from scripts.quickstart.compare import show
from scripts.quickstart.outcome import Outcome, Run, time_remark
from scripts.quickstart.settings import RUNS, QuickstartError, Settings, check_flags, check_text, remarks
from scripts.quickstart.workspace import claim

DATA = PreparedData(Path("corpus"), Path("tokenizer"), 4096, 600, 3_000_000, 10_000_000, False)


def outcome_of(seconds: float = 1.0, raw_bytes: float = 1.0) -> Outcome:
    """Two runs of two iterations whose every scalar is 1, but for the compressed one's."""
    scalars = {tag: {1: 1.0, 2: 1.0} for tag in REQUIRED}
    changed = scalars | {SECONDS: {2: seconds}, "optimus-cc/embedding raw bytes": {1: raw_bytes, 2: raw_bytes}}
    runs = {
        name: Run(Record(Path(name), values), f"torchrun {name}", f"{name} <techniques>", 90.0)
        for name, values in zip(RUNS, (scalars, changed), strict=True)
    }
    return Outcome(Settings(), ("A <remark>.",), "my <text> & more", DATA, 12.0, runs)


def test_page_and_summary_hold_all_of_an_outcome(tmp_path: Path) -> None:
    outcome = outcome_of()
    outcome.write(tmp_path)
    page = (tmp_path / "index.html").read_text()
    for escaped in (
        "my &lt;text&gt; &amp; more",
        "compressed &lt;techniques&gt;",
        "A &lt;remark&gt;",
        "torchrun vanilla",
    ):
        assert escaped in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["runs"]["compressed"]["record"]["scalars"]["lm loss"] == {"1": 1.0, "2": 1.0}
    assert summary["comparison"]["final_validation_loss_change"] == 0
    assert summary["seconds"] == 192.0 and summary["settings"]["hidden"] == 256
    assert {"torch", "megatron-core", "python"} <= summary["machine"].keys()


def test_counters_that_contradict_each_other_and_a_slower_iteration_are_said() -> None:
    for outcome, said in ((outcome_of(), False), (outcome_of(raw_bytes=2.0), True)):
        console = Console(width=80, file=io.StringIO())
        show(console, outcome)
        assert ("CROSS-CHECK FAILED" in console.file.getvalue()) is said
    assert "as long either way" in time_remark(outcome_of().comparison)
    slow = time_remark(outcome_of(seconds=1.2).comparison)
    assert "does not pay here: an iteration takes 20% longer" in slow


# -- settings and text ----------------------------------------------------------------------------------------------


def test_vanilla_gets_none_of_our_flags_and_further_flags_win_and_departures_from_the_paper_are_said() -> None:
    settings, further = Settings(), ["--compressed-backprop-messages", "all", "--dp-compression-rank", "4"]
    assert settings.technique_flags("vanilla", further) == []
    config = check_flags(settings, further)
    assert config.compressed_backprop and config.fused_embedding_sync and config.dp_compression
    assert (config.compressed_backprop_messages, config.dp_compression_rank) == ("all", 4)
    assert config.compressed_backprop_rank == settings.backprop_rank
    # A departure from the paper's setting is said, unless it is taken back.
    assert any("is dropped, not carried" in remark for remark in remarks(settings, config))
    config = check_flags(settings, ["--residual-across-iterations", "carry"])
    assert config.residual_across_iterations == "carry"
    assert not any("dropped" in remark for remark in remarks(settings, config))


@pytest.mark.parametrize(("iterations", "interval"), [(160, 16), (100, 10), (25, 5), (101, 101), (3, 1)])
def test_the_last_validation_is_at_the_end(iterations: int, interval: int) -> None:
    assert replace(Settings(), iterations=iterations).evaluation_interval == interval


@pytest.mark.parametrize(("hidden", "deviation"), [(256, 0.0625), (64, 0.125)])
def test_weights_start_from_a_deviation_of_one_over_the_root_of_the_hidden_size(hidden: int, deviation: float) -> None:
    # With Megatron's 0.02 so narrow a model takes steps of a hundred times the usual gradient norm.
    flags = replace(Settings(), hidden=hidden).megatron_flags(DATA, Path("events"))
    assert float(flags[flags.index("--init-method-std") + 1]) == pytest.approx(deviation, rel=1e-3)


def test_bad_further_flags_and_a_text_without_a_validation_part_are_refused_before_anything_runs() -> None:
    with pytest.raises(FlagError, match="--dp-compression-rank"):
        check_flags(Settings(), ["--dp-compression-rank", "0"])
    with pytest.raises(QuickstartError, match="--lr: not an Optimus-CC flag"):
        check_flags(Settings(), ["--lr", "1"])
    check_text(Settings(), DATA)
    with pytest.raises(QuickstartError, match="3 documents"):
        check_text(Settings(), replace(DATA, documents=3))
    with pytest.raises(QuickstartError, match="500 tokens"):
        check_text(Settings(), replace(DATA, tokens=500))


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
        (tmp_path / ".out.lock").write_text("only a process number is repeated")
        with pytest.raises(QuickstartError, match=r"process unknown\)"), claim(tmp_path / "out", Path("/usr")):
            pass
    with claim(tmp_path / "out", Path("/usr")):
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
