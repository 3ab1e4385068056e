"""Foundations of quickstart, study and cluster benchmark: variants, texts, and runs that are not repeated."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext import OptimusConfig, __version__
from optimus_cc_ext.config.classes import DP_GRADIENTS, EMBEDDING, PIPELINE_BACKWARD
from optimus_cc_ext.techniques.crossing import crossing_lines
from optimus_cc_ext.techniques.grid import RankPlace
from scripts.experiments.models import MODELS, Layout, Training
from scripts.experiments.runs import Runs, commit
from scripts.experiments.texts import Text, hash_of, text_of
from scripts.experiments.variants import CLUSTER, GRADIENTS, STUDY, flags_of, papers_ranks
from scripts.hosts.launch import RunFailed
from tests.shell_scripts import ROOT


@pytest.mark.full
def test_a_finished_run_is_a_row_and_is_not_made_again_unless_flags_or_text_differ(tmp_path: Path) -> None:
    script, counted = tmp_path / "counts.py", tmp_path / "counted"
    script.write_text(f"open({str(counted)!r}, 'a').write('once ')\n")
    runs, flags = Runs(tmp_path / "runs", "hash", 5.0, retry=False), [str(script)]

    def read(folder: Path) -> dict[str, Any]:
        return {"said": (folder / "log.txt").read_text().splitlines()[0][:34]}

    row = runs.made("one", 1, flags, 7, read)
    assert row == {
        "commit": commit(),
        "seed": 7,
        "text": "hash",
        "flags": flags,
        "said": "$ OPTIMUS_CC_NODE=ranks:1 torchrun",
    }
    assert runs.made("one", 1, flags, 7, read) == row and counted.read_text() == "once "
    assert runs.rows().rows == [("one", commit(), 7, "hash")]
    assert runs.known("one", [*flags, "--more"]) is None and runs.known("another", flags) is None
    assert Runs(tmp_path / "runs", "of another text", 5.0, retry=False).known("one", flags) is None
    # A row of grid.csv from before rows named a text still counts.
    result = tmp_path / "runs" / "one" / "result.json"
    result.write_text(json.dumps({"flags": flags, "said": "before"}))
    assert runs.made("one", 1, flags, 7, read)["said"] == "before" and counted.read_text() == "once "


@pytest.mark.full
def test_a_run_that_fails_leaves_no_row_and_is_made_again_on_demand(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('on purpose')\n")
    for retry, reason in ((False, "rank 0 ended with status 1"), (False, "it failed before")):
        with pytest.raises(RunFailed, match=reason):
            Runs(tmp_path / "runs", "hash", 5.0, retry).made("one", 1, [str(script)], 1, lambda folder: {})
    runs = Runs(tmp_path / "runs", "hash", 5.0, retry=True)
    assert runs.rows().rows == []
    script.write_text("print('mended')\n")
    assert runs.made("one", 1, [str(script)], 1, lambda folder: {})["flags"] == [str(script)]


@pytest.mark.full
def test_a_run_that_leaves_dense_what_was_asked_for_is_an_error(tmp_path: Path) -> None:
    inside = [RankPlace(rank=rank, stage=0, tensor_rank=0) for rank in range(2)]
    config = OptimusConfig(dp_compression_format="int4", only_between_nodes="dp_compression")
    (line,) = crossing_lines(config, inside)
    script = tmp_path / "says.py"
    script.write_text(f"print('optimus-cc: {line}')\n")
    with pytest.raises(RunFailed, match="nothing was compressed of DP gradients"):
        Runs(tmp_path / "runs", "hash", 5.0, retry=False).made("one", 1, [str(script)], 1, lambda folder: {})


def test_the_commit_is_the_checkouts() -> None:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    expected = found.stdout.strip() if found.returncode == 0 else __version__
    assert commit().removesuffix("-dirty") == expected


def test_a_text_is_prepared_once_and_known_by_its_tokens(tmp_path: Path) -> None:
    def text(words: str) -> Text:
        folder = tmp_path / words
        folder.mkdir(exist_ok=True)
        (folder / "a.txt").write_text(f"{words} and some more text. " * 50)
        return text_of(folder)

    one, other = (text(words).prepared(tmp_path / f"{words}-data", 300, 1.0) for words in ("one", "other"))
    again = text_of(tmp_path / "one").prepared(tmp_path / "one-data", 300, 1.0)
    assert (one.up_to_date, again.up_to_date) == (False, True)
    assert hash_of(one) == hash_of(again) != hash_of(other)
    assert text_of(None).pattern == "[!_]*.py" and text_of(tmp_path).pattern == "*.txt"
    assert text_of(None, "*.rst").pattern == "*.rst"


def test_every_variant_works_on_every_layout_without_flags_of_classes_that_are_not_there() -> None:
    for layout in map(Layout.parsed, ("pp2dp2", "pp2dp1", "pp1dp2", "tp2pp4dp2z1")):
        training = Training(model=MODELS["small"], layout=layout)
        tables = STUDY | CLUSTER, *GRADIENTS.values()
        # Variants of tokens are for models with experts, which "small" is not.
        variants = [(name, text) for table in tables for name, text in table.items() if "--expert-" not in text]
        for name, text in variants:
            flags = flags_of(text, layout, papers_ranks(256), ["--no-compression-metrics"])
            # these variants set a flag of Megatron's
            config = training.config_of(flags, ignore_others="instances" in name or "bf16" in name)
            between, replicas = any(map(config.is_on, (PIPELINE_BACKWARD, EMBEDDING))), config.is_on(DP_GRADIENTS)
            assert not (between and layout.stages == 1) and not (replicas and layout.replicas == 1), name
            assert name == "vanilla" or flags[-1] == "--no-compression-metrics"


def test_a_flag_is_left_out_with_its_value_and_its_neighbours_stay() -> None:
    text = "--dp-compression --dp-compression-rank {dp_rank} --compression-seed 8 --pipeline-forward-format int8"
    assert flags_of(text, Layout(replicas=1), (2, 11)) == [
        "--compression-seed", "8", "--pipeline-forward-format", "int8",
    ]  # fmt: skip
    assert flags_of(text, Layout(stages=1), (2, 11)) == [
        "--dp-compression", "--dp-compression-rank", "11", "--compression-seed", "8",
    ]  # fmt: skip
    assert papers_ranks(3072) == (16, 128) and papers_ranks(256) == (2, 11)
