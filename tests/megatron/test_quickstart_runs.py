"""The quickstart as a person runs it: both trainings, and every way in which it can be ended."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from optimus_cc_ext.report.comparison import PICTURES
from scripts.quickstart.settings import TINY

ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZE = 4
ENDLESS = ("--iterations", "100000")
SECONDS_TO_START = 90
"""Four ranks import Megatron: 10 s on 2 idle cores, several times that on busy ones."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a text of 500 KB in it. One for all tests: what one leaves behind must not disturb the next."""
    folder = tmp_path_factory.mktemp("quickstart")
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    (folder / "text.txt").write_text(text[:500_000], encoding="utf-8")
    return folder


def command(folder: Path, *flags: str) -> list[str]:
    paths = ("--input", str(folder / "text.txt"), "--output", str(folder / "out"))
    return [sys.executable, "-m", "scripts.quickstart", "--tiny", *paths, *flags]


@contextmanager
def training(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A quickstart in the midst of its first run, and all of its processes; it writes to the files below."""
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        quickstart = psutil.Popen(command(folder, *ENDLESS), cwd=ROOT, stdout=stdout, stderr=stderr)
    tree: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while "vanilla: iteration 1/" not in (folder / "stdout").read_text():
            assert quickstart.poll() is None, (folder / "stderr").read_text()
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.1)
        tree = quickstart.children(recursive=True)
        assert len(ranks(tree)) == WORLD_SIZE
        yield quickstart, tree
    finally:
        for process in (quickstart, *tree):
            with suppress(psutil.Error):
                process.kill()
        quickstart.wait()


def ranks(tree: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that train, in the order of their ranks."""
    found = {}
    for process in tree:
        with suppress(psutil.Error):
            environment = process.environ()
            if "LOCAL_RANK" in environment:
                found[int(environment["RANK"])] = process
    return [found[rank] for rank in sorted(found)]


def assert_all_gone(tree: list[psutil.Process], seconds: float = 10.0) -> None:
    _, alive = psutil.wait_procs(tree, timeout=seconds)
    assert not alive, [process.cmdline()[:6] for process in alive]


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_every_process_and_keeps_nothing_unfinished(folder: Path, signum: int) -> None:
    with training(folder) as (quickstart, tree):
        if signum == signal.SIGINT:  # the folder is taken as long as it runs
            second = subprocess.run(command(folder), cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert second.returncode == 2
            assert f"process {quickstart.pid}) is writing to" in second.stderr
        quickstart.send_signal(signum)
        status = quickstart.wait(30)
        errors = (folder / "stderr").read_text()
        assert status == 128 + signum, errors
        assert_all_gone(tree)
        assert "interrupted" in errors and "Traceback" not in errors
    assert not (folder / "out.unfinished").exists() and not (folder / "out").exists()


@pytest.mark.full
def test_killed_without_a_chance_to_clean_up_it_leaves_no_process(folder: Path) -> None:
    with training(folder) as (quickstart, tree):
        quickstart.kill()
        quickstart.wait(10)
        assert_all_gone(tree)


@pytest.mark.full
def test_a_rank_that_dies_ends_everything_with_the_reason_on_the_terminal(folder: Path) -> None:
    with training(folder) as (quickstart, tree):
        died = time.monotonic()
        ranks(tree)[2].kill()
        assert quickstart.wait(60) == 1
        assert time.monotonic() - died < 60
        errors = (folder / "stderr").read_text()
        assert "error: rank 2 was ended by Signal 9 (SIGKILL)" in errors
        assert_all_gone(tree)
    log = Path(re.search(r"the whole log: (.+)", errors)[1])
    assert "iteration        1/" in log.read_text(), "the log must stay for the user to read"
    assert not (folder / "out").exists()


# After the tests above on purpose: in the same folder, it starts from what they left.
def test_both_runs_are_compared_from_the_same_start(folder: Path) -> None:
    done = subprocess.run(command(folder), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for line in ("final validation loss", "pipeline backward", "all traffic", "index.html"):
        assert line in done.stdout
    output = folder / "out"
    pictures = {f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg")}
    written = {path.name for path in output.iterdir()}
    assert written == {"compressed", "vanilla", "index.html", "summary.json", *pictures}
    assert not (folder / "out.unfinished").exists()

    summary = json.loads((output / "summary.json").read_text())
    vanilla, compressed = (summary["runs"][name] for name in ("vanilla", "compressed"))
    losses = [list(run["record"]["scalars"]["lm loss"].values()) for run in (vanilla, compressed)]
    assert len(losses[0]) == len(losses[1]) == summary["settings"]["iterations"] == 3
    assert losses[0][0] == losses[1][0], "the first loss comes before the first compressed update: the same weights"
    assert losses[0][1:] != losses[1][1:], "compression must be felt"
    assert losses[0][-1] < losses[0][0] and losses[1][-1] < losses[1][0]

    assert summary["comparison"]["raw_equals_what_vanilla_sent"] is True
    traffic = summary["comparison"]["traffic_bytes_per_iteration"]
    ratios = {name: share["ratio"] for name, share in traffic.items()}
    assert ratios["pipeline forward"] == 1
    # One of 4 messages on each link is of the epilogue: 3 whole ones, and a part of the fourth.
    assert 0.75 < ratios["pipeline backward"] < 0.80
    # Rank 4 of 64 x 64 to 256 x 64 matrices, and the vectors whole.
    assert 0 < ratios["DP gradients"] < 0.25
    # D = 2: V(2D - 1)/D = 1.5 V of V(3D - 2)/D = 2 V.
    assert ratios["embedding"] == 0.75
    assert vanilla["techniques"] == "every technique is off"
    assert "fused embedding sync" in compressed["techniques"]

    log = (output / "vanilla" / "log.txt").read_text()
    # Ranks write to one pipe: a line's end can come after the next line's beginning.
    per_stage = dict(re.findall(r"number of parameters on .*? rank \((?:\d+, )*(\d)\): (\d+)", log))
    assert len(per_stage) == 2
    assert TINY.parameters == sum(map(int, per_stage.values())) - TINY.vocabulary * TINY.hidden


def test_bad_input_ends_at_once_with_the_reason(folder: Path) -> None:
    for flags, reason in (
        (["--input", str(folder / "no such")], "no such"),
        (["--iterations", "1"], "--iterations 1"),
        (["--", "--dp-compression-rank", "0"], "--dp-compression-rank"),
    ):
        done = subprocess.run(command(folder, *flags), cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert reason in done.stderr and "Traceback" not in done.stderr
