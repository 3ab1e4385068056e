"""The quickstart as a person runs it: both trainings, and every way in which it can be ended."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from optimus_cc_ext.tools.report.comparison import FILES
from scripts.hosts.network import why_not
from scripts.quickstart.settings import TINY
from tests.shaped_links import needs_namespaces, without_namespaces

ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZE = 4
ENDLESS = ("--iterations", "100000")
SECONDS_TO_START = 180
"""Seconds in which four launchers and four ranks import torch, and these Megatron: 20 on 2 idle cores, more on
busy ones.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a text of 500 KB. All tests share it, because leftovers of one must not disturb the next."""
    folder = tmp_path_factory.mktemp("quickstart")
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    (folder / "text.txt").write_text(text[:500_000], encoding="utf-8")
    return folder


def command(folder: Path, *flags: str) -> list[str]:
    paths = ("--input", str(folder / "text.txt"), "--output", str(folder / "out"))
    return [sys.executable, "-m", "scripts.quickstart", "--tiny", *paths, *flags]


@contextmanager
def training(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process], set[int]]]:
    """Start a quickstart, and wait until its first run trains; yield it, its processes and its hosts."""
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
        hosts = namespaces(tree) - namespaces([psutil.Process()])
        assert len(hosts) == (0 if why_not() else WORLD_SIZE + 1), "four hosts and the switch"
        yield quickstart, tree, hosts
    finally:
        for process in (quickstart, *tree):
            with suppress(psutil.Error):
                process.kill()
        quickstart.wait()


def ranks(tree: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that train, in the order of their ranks."""
    found = {}
    for process in tree:
        with suppress(psutil.Error):
            environment = process.environ()
            if "LOCAL_RANK" in environment:
                found[int(environment["RANK"])] = process
    return [found[rank] for rank in sorted(found)]


def namespaces(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the inodes of the processes' network namespaces."""
    found = set()
    for process in processes:
        with suppress(OSError):
            found.add(os.stat(f"/proc/{process.pid}/ns/net").st_ino)
    return found


def assert_all_gone(tree: list[psutil.Process], hosts: set[int], seconds: float = 10.0) -> None:
    _, alive = psutil.wait_procs(tree, timeout=seconds)
    assert not alive, [process.cmdline()[:6] for process in alive]
    assert not hosts & namespaces(psutil.process_iter()), "a host is left, held by some process"


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_every_process_and_keeps_nothing_unfinished(folder: Path, signum: int) -> None:
    with training(folder) as (quickstart, tree, hosts):
        if signum == signal.SIGINT:  # this lock keeps the folder claimed while the first quick start runs
            second = subprocess.run(command(folder), cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert second.returncode == 2
            assert f"another process ({quickstart.pid}) is writing to it" in second.stderr
        quickstart.send_signal(signum)
        status = quickstart.wait(30)
        errors = (folder / "stderr").read_text()
        assert status == 128 + signum, errors
        assert_all_gone(tree, hosts)
        assert "interrupted" in errors and "Traceback" not in errors
    assert not (folder / "out.unfinished").exists() and not (folder / "out").exists()


@pytest.mark.full
def test_killed_without_a_chance_to_clean_up_it_leaves_no_process(folder: Path) -> None:
    with training(folder) as (quickstart, tree, hosts):
        quickstart.kill()
        quickstart.wait(10)
        assert_all_gone(tree, hosts)


@pytest.mark.full
def test_a_rank_that_dies_ends_everything_with_the_reason_on_the_terminal(folder: Path) -> None:
    with training(folder) as (quickstart, tree, hosts):
        died = time.monotonic()
        ranks(tree)[2].kill()
        assert quickstart.wait(60) == 1
        assert time.monotonic() - died < 60
        errors = (folder / "stderr").read_text()
        assert "rank 2 was ended by Signal 9 (SIGKILL)" in errors
        assert_all_gone(tree, hosts)
    log = Path(re.search(r"the whole log: (.+)", errors)[1])
    assert "SIGKILL" in log.read_text(), "the log must stay for the user to read"
    assert not (folder / "out").exists()


# This test comes after the tests above deliberately: in the same folder, it starts from their leftovers.
@pytest.mark.ci
def test_both_runs_are_compared_from_the_same_start(folder: Path) -> None:
    done = subprocess.run(command(folder), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for line in ("final validation loss", "pipeline backward", "all traffic", "times as fast", "index.html"):
        assert line in done.stdout
    output = folder / "out"
    written = {path.name for path in output.iterdir()}
    # Seconds, bytes and both losses are in tables and one picture, so they have no pictures of their own.
    twice = ("training_loss", "validation_loss", "gradient_norm", "seconds.")
    files = {name for name in FILES if not name.startswith(twice)}
    assert written == {"compressed", "vanilla", "index.html", "summary.json", *files}
    assert not (folder / "out.unfinished").exists()

    summary = json.loads((output / "summary.json").read_text())
    vanilla, compressed = (summary["runs"][name] for name in ("vanilla", "compressed"))
    losses = [list(run["record"]["scalars"]["lm loss"].values()) for run in (vanilla, compressed)]
    assert len(losses[0]) == len(losses[1]) == summary["settings"]["iterations"] == 8
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.01), "the same weights, but activations in int8"
    assert losses[0][1:] != losses[1][1:], "compression must be felt"
    assert losses[0][-1] < losses[0][0] and losses[1][-1] < losses[1][0]

    assert summary["comparison"]["raw_equals_what_vanilla_sent"] is True
    traffic = summary["comparison"]["traffic_bytes_per_iteration"]
    ratios = {name: share["ratio"] for name, share in traffic.items()}
    # int8 activations have 8.13 of 32 bits and some padding; gradients as many to the owner of a shard and back, and
    # dense vectors.
    assert 0.25 < ratios["pipeline forward"] < 0.27 and 0.25 < ratios["pipeline backward"] < 0.27
    assert 0.25 < ratios["DP gradients"] < 0.29
    assert 0.15 < ratios["embedding"] < 0.25
    assert vanilla["techniques"] == "every technique is off"
    assert "embedding" in compressed["techniques"]
    assert summary["shaped"] is (why_not() is None) and set(summary["comparison"]["seconds_per_iteration"]) == (
        {"on one machine"} if why_not() else {"links of 20 Mbit/s", "unshaped links"}
    )

    log = "".join(path.read_text() for path in (output / "vanilla").glob("*.txt"))
    # Ranks write to one pipe: a line's end can come after the next line's beginning.
    per_stage = dict(re.findall(r"number of parameters on .*? rank \((?:\d+, )*(\d)\): (\d+)", log))
    assert len(per_stage) == 2
    assert TINY.parameters == sum(map(int, per_stage.values())) - TINY.model.vocabulary * TINY.model.hidden


@needs_namespaces
@pytest.mark.full
def test_where_namespaces_are_forbidden_the_gain_is_planned_and_the_reason_said(folder: Path) -> None:
    forbidden = without_namespaces(command(folder))
    done = subprocess.run(forbidden, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "hosts: none, all ranks share this machine (this user cannot make namespaces: unshare" in done.stdout
    page = (folder / "out" / "index.html").read_text()
    assert "planned, not measured, for links of 20mbit" in page and "times as fast (planned)" in page


@pytest.mark.full
def test_bad_input_ends_at_once_with_the_reason(folder: Path) -> None:
    for flags, reason in (
        (["--input", str(folder / "no such")], "no such"),
        (["--iterations", "1"], "--iterations 1"),
        (["--rate", "fast"], "--rate: 'fast' is not a rate"),
        (["--", "--dp-compression-rank", "0"], "--dp-compression-rank"),
    ):
        done = subprocess.run(command(folder, *flags), cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert reason in done.stderr and "Traceback" not in done.stderr
