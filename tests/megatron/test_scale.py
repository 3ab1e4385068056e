"""One rank of 2,048 and of 10,000 on Megatron's real loop, over fake process groups; see `one_of_many`.

Each test prints what it measured; `pytest --full -s -n0 tests/megatron/test_scale.py` shows the tables.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.megatron.one_of_many import RANKS_PER_NODE

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

LAYOUTS = {
    2048: "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4",
    10_000: "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 5",
}
OFF = "--no-compression-metrics"
OURS = {
    "balanced": "--optimus-cc balanced --dp-compression-stages all",
    "paper": "--optimus-cc --dp-compression-rank 4 --compressed-backprop-rank 4 --dp-compression-stages all",
}
MOST_SECONDS, MOST_MB = 15, 200
"""CPU-seconds and memory of a rank beyond vanilla's, over start, three iterations and a checkpoint."""

START_UP_SECONDS = 2


def rank_of(ranks: int, flags: str, *more: str, rank: int = 0) -> dict[str, Any]:
    """Run one rank of a run of `ranks` ranks, and return what `one_of_many` prints."""
    command = [sys.executable, "-m", "tests.megatron.one_of_many", "--ranks", str(ranks), "--rank", str(rank), *more]
    ended = subprocess.run(
        [*command, "--", *flags.split()], capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def of_ours(found: dict[str, Any]) -> list[str]:
    """Return the names of the files that Optimus-CC wrote for a rank, without the rank's number."""
    return [Path(name).name for name in found["ours"] if Path(name).suffix]


@cache
def vanillas(ranks: int) -> dict[str, Any]:
    """Return the measurements of the first rank of vanilla Megatron, which saves a checkpoint, too."""
    with TemporaryDirectory() as folder:
        found = rank_of(ranks, f"{LAYOUTS[ranks]} {OFF}", "--save", folder)
    assert found["ended"] is None and found["ours"] == [], found
    return found


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_a_rank_of_thousands_costs_little_more_than_vanillas_and_few_lines_and_files(
    ranks: int, name: str, tmp_path: Path
) -> None:
    layout, flags, vanilla = LAYOUTS[ranks], OURS[name], vanillas(ranks)
    found = rank_of(ranks, f"{layout} {flags}", "--save", str(tmp_path / name))
    assert found["ended"] is None, found
    seconds, mb = (found[key] - vanilla[key] for key in ("cpu_seconds", "mb"))
    # A rank other than the first writes its own file of a state with tensors, and never topology.json.
    of_each = len([file for file in of_ours(found) if file.startswith("rank_")])
    kinds = {"last": ranks - 1, "first of a node": RANKS_PER_NODE, "other": RANKS_PER_NODE + 1}
    others = {kind: rank_of(ranks, f"{layout} {flags}", rank=rank) for kind, rank in kinds.items()}
    assert {kind: other["ended"] for kind, other in others.items()} == dict.fromkeys(kinds)
    lines = {kind: len(other["lines"]) for kind, other in others.items()}
    nodes = ranks // RANKS_PER_NODE
    in_all = len(found["lines"]) + lines["last"] + (nodes - 1) * lines["first of a node"]
    in_all += (ranks - nodes - 1) * lines["other"]
    print(
        f"{ranks} ranks, {name}: {seconds:+.1f} CPU-seconds and {mb:+.0f} MB beyond vanilla "
        f"({vanilla['cpu_seconds']:.1f} s, {vanilla['mb']:.0f} MB); {in_all} lines in the log; "
        f"{1 + ranks * of_each} files of ours in a checkpoint"
    )
    assert seconds < MOST_SECONDS and mb < MOST_MB
    assert lines["first of a node"] == lines["other"] == 0 < lines["last"] and in_all < 30
    assert of_each == (name == "paper"), "a state without tensors needs no file of each rank"


def test_one_of_thousands_with_other_settings_is_named_in_one_sentence() -> None:
    said = rank_of(2048, f"{LAYOUTS[2048]} {OURS['balanced']}", "--odd-one", rank=5)["ended"]
    assert "rank 0 and rank 1024 run with different settings: --compression-seed 1234 against 1235" in said
    assert len(said) < 200


@pytest.mark.parametrize("replicas", [64, 512, 1024])
def test_600_parameters_in_16_buckets_are_ready_within_seconds(replicas: int) -> None:
    found = rank_of(replicas, f"--num-layers 50 {OURS['balanced']}")
    assert found["ended"] is None, found
    start_up = found["start_up"]
    print(f"start-up at D = {replicas}: {start_up['cpu_seconds']:.2f} CPU-seconds, {start_up['mb']:.0f} MB")
    assert start_up["cpu_seconds"] < START_UP_SECONDS
