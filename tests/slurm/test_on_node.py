"""One node's share of a job without Slurm: on_node.sh gets the signals that proctrack/cgroup would send."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = 100_000
FLAGS = [
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--eval-iters", "0", "--num-workers", "1"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--exit-signal-handler"),
]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_signal_to_on_node_alone_makes_every_rank_save_and_end_with_status_0(tmp_path: Path) -> None:
    mark, log = tmp_path / "interrupted", tmp_path / "log"
    environment = {
        **os.environ,
        **{"MODEL": "tiny", "PIPELINE_PARALLEL": "2", "TRAIN_ITERS": str(ENDLESS), "OPTIMUS_CC_DEVICE": "cpu"},
        **{"CHECKPOINT_DIR": str(tmp_path / "checkpoints"), "SAVE_INTERVAL": str(ENDLESS), "OMP_NUM_THREADS": "1"},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [ROOT / "scripts/slurm/on_node.sh", mark, ROOT / "scripts/pretrain_gpt.sh", *FLAGS]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def trained() -> int:
        return max(map(int, re.findall(r"iteration +(\d+)/", log.read_text())), default=0)

    try:
        end = time.monotonic() + 240
        while trained() < 2:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        # Slurm sends SIGUSR1 before a time limit; its default action would kill torchrun and the ranks.
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=120) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            # The ranks have sessions of their own, but torchrun ends them when it is interrupted.
            os.killpg(process.pid, signal.SIGQUIT)
            process.wait(timeout=60)
    assert mark.exists()
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == str(trained())
    assert trained() < ENDLESS


def on_node(cache: Path, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    """Run the command `true` through on_node.sh, with `cache` as NODE_CACHE."""
    command = [ROOT / "scripts/slurm/on_node.sh", "/dev/null", "true"]
    environment = {**os.environ, "NODE_CACHE": str(cache), "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_two_jobs_that_start_on_a_node_at_once_share_the_folder_of_kernels(tmp_path: Path) -> None:
    # This program stands for another job: it makes the folder, and then calls mkdir for this job.
    programs, node = tmp_path / "programs", tmp_path / "node"
    programs.mkdir()
    node.mkdir()
    mkdir = programs / "mkdir"
    mkdir.write_text('#!/bin/sh\nPATH=/usr/bin:/bin\nmkdir "$@"\nexec mkdir "$@"\n')
    mkdir.chmod(0o755)
    done = on_node(node, f"{programs}:{os.environ['PATH']}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (node / f"optimus-cc-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_named_with_the_reason_and_the_cure(tmp_path: Path) -> None:
    done = on_node(tmp_path / "missing")
    assert done.returncode == 2
    assert "on_node.sh: error: NODE_CACHE" in done.stderr and "No such file or directory" in done.stderr
    assert "Set NODE_CACHE to a folder" in done.stderr


def test_a_stop_is_repeated_until_the_command_ends(tmp_path: Path) -> None:
    """A signal ahead of the time limit may come before a rank has its handler, and is then lost."""
    # It is deaf at first, as a rank that imports Megatron; SIGTERM is ignored where it starts.
    rank = (
        "import pathlib, signal, sys, time; pathlib.Path('ready').touch(); time.sleep(2)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); time.sleep(60)"
    )
    command = [ROOT / "scripts/slurm/on_node.sh", tmp_path / "mark", "env", "LOCAL_RANK=0", sys.executable, "-c", rank]
    environment = {**os.environ, "NODE_CACHE": str(tmp_path), "REPEAT_SECONDS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == 7 and (tmp_path / "mark").exists()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_temporary_files_lie_in_a_folder_of_the_job_which_is_empty_at_its_start_and_gone_at_its_end(
    short_path: Path,
) -> None:
    left = short_path / f"optimus-cc-{os.getuid()}/tmp-7/pymp-left"  # by a start that was killed
    left.mkdir(parents=True, mode=0o700)
    (short_path / f"optimus-cc-{os.getuid()}").chmod(0o700)
    command = [ROOT / "scripts/slurm/on_node.sh", short_path / "mark", "sh", "-c", 'echo "$TMPDIR"; ls "$TMPDIR"']
    environment = {**os.environ, "NODE_CACHE": str(short_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert done.stdout.splitlines() == [str(left.parent)] and done.returncode == 0, done.stderr
    assert not left.parent.exists()
