"""The quickstart's parts that need no training: its settings, its results, its folders."""

import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools.data import DataError, PreparedData
from optimus_cc_ext.tools.report.comparison import REQUIRED
from optimus_cc_ext.tools.report.record import SECONDS, Record
from scripts.experiments.models import ExperimentError, device_here
from scripts.experiments.variants import STUDY
from scripts.hosts.launch import torchrun_command
from scripts.quickstart.compare import _instead_of_hosts, claim, show
from scripts.quickstart.outcome import Outcome, Run
from scripts.quickstart.settings import Settings, check_text

DATA = PreparedData(Path("corpus"), Path("tokenizer"), 4096, 600, 3_000_000, 10_000_000, False)


def outcome_of(raw_bytes: float = 1.0, no_links: str = "") -> Outcome:
    """Make 30 iterations whose every scalar is 1 but seconds: 4 and 2 on shaped links, 1 and 1.25 on others."""
    scalars = {tag: dict.fromkeys(range(1, 31), 1.0) for tag in REQUIRED}
    settings = replace(Settings(), iterations=30, shaped=not no_links)
    runs = {}
    for name, shaped, free in (("vanilla", 4.0, 1.0), ("compressed", 2.0, 1.25)):
        # The first three iterations set up, and the links change during the one after shaping ends.
        seconds = {i: 99.0 if i < 4 or i == 16 else shaped if i < 16 and not no_links else free for i in range(2, 31)}
        changed = {SECONDS: seconds}
        if name == "compressed":
            changed["optimus-cc/embedding raw bytes"] = dict.fromkeys(range(1, 31), raw_bytes)
        flags = tuple(settings.technique_flags(name, ()))
        runs[name] = Run(Record(Path(name), scalars | changed), f"torchrun {name}", flags, f"{name} <techniques>", 90.0)
    return Outcome(settings, no_links, "my <text> & more", DATA, 12.0, runs)


@pytest.mark.full
def test_page_and_summary_hold_all_of_an_outcome(tmp_path: Path) -> None:
    outcome = outcome_of()
    outcome.write(tmp_path)
    page = (tmp_path / "index.html").read_text()
    for escaped in ("my &lt;text&gt; &amp; more", "compressed &lt;techniques&gt;", "torchrun vanilla"):
        assert escaped in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["runs"]["compressed"]["record"]["scalars"]["lm loss"] == {str(i): 1.0 for i in range(1, 31)}
    assert summary["comparison"]["final_validation_loss_change"] == 0
    assert (
        summary["speedup"] == 2.0
        and "<h1>2.00 times as fast on links of 100 Mbit/s, validation loss +0.00%</h1>" in page
    )
    assert summary["seconds"] == 192.0 and summary["settings"]["hidden"] == 256
    assert {"torch", "megatron-core", "python"} <= summary["machine"].keys()


def test_counters_that_contradict_each_other_are_said() -> None:
    for outcome, said in ((outcome_of(), False), (outcome_of(raw_bytes=2.0), True)):
        console = Console(width=80, file=io.StringIO())
        show(console, outcome)
        assert ("CROSS-CHECK FAILED" in console.file.getvalue()) is said


def test_shaped_and_unshaped_iterations_are_told_apart_and_what_is_not_won_is_said() -> None:
    outcome = outcome_of()
    assert outcome.settings.spans == {"links of 100 Mbit/s": (4, 15), "unshaped links": (17, math.inf)}
    speed, *_ = outcome.numbers()
    assert speed.value == "2.00"
    assert speed.note.startswith("on links of 100 Mbit/s: 2.00 s an iteration, 4.00 s vanilla")
    assert speed.note.endswith("On unshaped links it is 25% slower: 1.25 s, 1.00 s vanilla")


def test_without_hosts_the_gain_is_planned_for_the_rate_and_the_reason_said() -> None:
    outcome = outcome_of(no_links="no namespaces for this user")
    speed, *_ = outcome.numbers()
    assert (
        "planned, not measured, for links of 100 Mbit/s. This machine has none (no namespaces for this user)"
        in speed.note
    )
    # 64 MB of gradients at 12 MB/s a host take vanilla far longer than the quarter of a second that coding costs.
    assert 1.3 < outcome.speedup < 4 and speed.value == f"{outcome.speedup:.2f}"
    slower = replace(outcome, settings=replace(outcome.settings, rate="25mbit"))
    assert slower.speedup > outcome.speedup


# -- settings and text ----------------------------------------------------------------------------------------------


def test_vanilla_gets_none_of_our_flags_and_further_flags_win_over_the_preset() -> None:
    settings, further = Settings(), ["--dp-compression-format", "int4"]
    assert settings.technique_flags("vanilla", further) == []
    assert settings.technique_flags("compressed", []) == STUDY["balanced"].split()
    config = settings.config_of(settings.technique_flags("compressed", further))
    assert config.pipeline_forward_format == "int8" and config.fused_embedding_sync_format == "int8"
    assert config.dp_compression_format == "int4"


@pytest.mark.parametrize(("iterations", "interval"), [(160, 20), (100, 20), (25, 5), (101, 101), (8, 1)])
def test_the_last_validation_is_at_the_end(iterations: int, interval: int) -> None:
    assert replace(Settings(), iterations=iterations).evaluation_interval == interval


@pytest.mark.parametrize(("hidden", "deviation"), [(256, 0.0625), (64, 0.125)])
def test_weights_start_from_a_deviation_of_one_over_the_root_of_the_hidden_size(hidden: int, deviation: float) -> None:
    # With Megatron's 0.02, so narrow a model takes steps of a hundred times the usual gradient norm.
    flags = replace(Settings(), model=replace(Settings().model, hidden=hidden)).flags()
    assert float(flags[flags.index("--init-method-std") + 1]) == pytest.approx(deviation, rel=1e-3)


def test_on_shared_gpus_it_trains_in_bf16_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIMUS_CC_DEVICE", "shared-gpu")
    settings = replace(Settings(), device=device_here(4))
    assert "--bf16" in settings.megatron_flags(DATA, Path("events"))
    assert "times are those of no cluster" in _instead_of_hosts(settings.device, 4) and not _instead_of_hosts("cpu", 4)
    command = torchrun_command(4, [], settings.device)
    assert command.startswith("OPTIMUS_CC_NODE=ranks:1 OPTIMUS_CC_DEVICE=shared-gpu torchrun ")
    assert "--bf16" not in Settings().megatron_flags(DATA, Path("events"))
    monkeypatch.delenv("OPTIMUS_CC_DEVICE")
    for gpus, device in ((0, "cpu"), (1, "shared-gpu"), (4, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert device_here(4) == device


def test_bad_further_flags_and_a_text_without_a_validation_part_are_refused_before_anything_runs() -> None:
    with pytest.raises(FlagError, match="--dp-compression-rank"):
        Settings().config_of(["--dp-compression-rank", "0"])
    with pytest.raises(FlagError, match="--lr: not an Optimus-CC flag"):
        Settings().config_of(["--lr", "1"])
    check_text(Settings(), DATA)
    with pytest.raises(ExperimentError, match="3 documents"):
        check_text(Settings(), replace(DATA, documents=3))
    with pytest.raises(ExperimentError, match="500 tokens"):
        check_text(Settings(), replace(DATA, tokens=500))


# -- folders --------------------------------------------------------------------------------------------------------


def test_an_output_belongs_to_one_quickstart_at_a_time(tmp_path: Path) -> None:
    with claim(tmp_path / "out", Path("/usr")):
        with (
            pytest.raises(ExperimentError, match=rf"out: another process \({os.getpid()}\) is writing to it"),
            claim(tmp_path / "out", Path("/usr")),
        ):
            pass
        with claim(tmp_path / "other", Path("/usr")):
            pass
        (tmp_path / ".out.lock").write_text("only a process number is repeated")
        with pytest.raises(ExperimentError, match=r"process \(unknown\)"), claim(tmp_path / "out", Path("/usr")):
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
