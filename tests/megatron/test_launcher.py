"""torchrun and the launcher as a person starts them: with and without a script, and when a rank dies."""

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.megatron_runs import TINY_GPT

ROOT = Path(__file__).resolve().parents[2]
TWO_STAGES = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--train-iters", "2", "--optimus-cc"]
MARK = "OPTIMUS_CC_TEST_RUN"


@dataclass(frozen=True)
class Ended:
    """Result of a torchrun that has ended."""

    code: int
    output: str
    seconds_since_epoch: float


@pytest.fixture
def mark() -> str:
    """Return a mark for the environment of every process of one run, by which survivors are found."""
    return uuid.uuid4().hex


def start_torchrun(
    arguments: Sequence[str], cwd: Path, mark: str, *, ranks: int = 2, python_path: str = str(ROOT),
    program: Sequence[str] = ("-m", "optimus_cc_ext"),
) -> subprocess.Popen[str]:  # fmt: skip
    """Start one agent with its ranks in `cwd`; stdout and stderr come through one pipe."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    place = ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    variables = {MARK: mark, "OPTIMUS_CC_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    return subprocess.Popen(
        [*agent, *place, *program, *arguments],
        cwd=cwd, env={**os.environ, **variables}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def torchrun(arguments: Sequence[str], cwd: Path, mark: str, limit: float = 150.0, **kwargs: Any) -> Ended:
    """Start torchrun and wait for its end; kill all that is left after `limit` seconds."""
    process = start_torchrun(arguments, cwd, mark, **kwargs)
    try:
        output, _ = process.communicate(timeout=limit)
        return Ended(process.returncode, output, time.time())
    except subprocess.TimeoutExpired as expired:
        for left in processes_of(mark):
            left.kill()
        pytest.fail(f"still running after {limit} s:\n{(expired.output or b'').decode()[-3000:]}")


def processes_of(mark: str) -> list[psutil.Process]:
    """Return every living process of the run; torchrun's ranks are in sessions of their own."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def logged_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]


def assert_said_once(output: str) -> None:
    """Assert that the lines about device and Megatron are printed once, not by every rank."""
    assert output.count("optimus-cc: running on CPU over gloo (OPTIMUS_CC_DEVICE=cpu)") == 1
    assert output.count("optimus-cc: Megatron from ") == 1
    assert output.count("optimus-cc: pipeline backward (rank 16, epilogue messages") == 1
    assert output.count("--optimus-cc leaves out DP gradients: one data-parallel replica") == 1


@pytest.mark.full
def test_without_a_script_it_trains_with_what_is_switched_on_said_once(tmp_path: Path, mark: str) -> None:
    ended = torchrun(TWO_STAGES, tmp_path, mark)
    assert ended.code == 0, ended.output[-3000:]
    assert_said_once(ended.output)
    losses = logged_losses(ended.output)
    assert len(losses) == 2 and all(5.0 < loss < 7.0 for loss in losses), losses  # log(512) = 6.2
    traffic = re.findall(r"optimus-cc traffic per iteration \| (.*)", ended.output)
    assert len(traffic) == 2, "once per logged iteration, by the last rank"
    for line in traffic:
        assert re.search(r"pipeline backward: \d+\.\d+ of \d+\.\d+ MB", line)
    assert processes_of(mark) == []


SCRIPT = """
import os
import sys
from optimus_cc_ext.tools import pretrain_gpt
from neighbour import greeting

if __name__ == "__main__":
    # One system call, so that the other rank's line cannot come in between.
    os.write(1, f"{greeting} {sys.argv[0]} {sys.argv[1]}\\n".encode())
    pretrain_gpt.main()
"""


@pytest.mark.full
def test_a_users_script_is_run_as_python_would_run_it(tmp_path: Path, mark: str) -> None:
    folder = tmp_path / "their scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("greeting = 'found the neighbour:'\n")
    ended = torchrun(["their scripts/train.py", *TWO_STAGES], tmp_path, mark)
    assert ended.code == 0, ended.output[-3000:]
    # Every rank runs the script, as __main__, with its own name and flags in sys.argv, and its folder on sys.path.
    assert ended.output.count("found the neighbour: their scripts/train.py --num-layers") == 2
    assert_said_once(ended.output)
    assert len(logged_losses(ended.output)) == 2
    assert processes_of(mark) == []


DYING_SCRIPT = """
import functools, os, pathlib, signal, time
from megatron.training import training
from optimus_cc_ext.tools import pretrain_gpt

train_step, steps = training.train_step, []

@functools.wraps(train_step)
def dying_train_step(*args, **kwargs):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 2:
        pathlib.Path("time of death").write_text(str(time.time()))
        {death}
    return train_step(*args, **kwargs)

if __name__ == "__main__":
    training.train_step = dying_train_step
    pretrain_gpt.main()
"""


@pytest.mark.full
def test_megatrons_persistent_writer_of_checkpoints_outlives_its_own_imports(tmp_path: Path, mark: str) -> None:
    """The writer is a child of a fork server; if it is dead, Megatron waits for it without an end."""
    flags = "--pipeline-model-parallel-size 2 --save saved --save-interval 2 --ckpt-format torch_dist --async-save"
    flags += " --use-persistent-ckpt-worker --async-strategy mcore --compressed-backprop --compressed-backprop-rank 4"
    ended = torchrun([*TINY_GPT, *flags.split()], tmp_path, mark, ranks=2)
    assert ended.code == 0, ended.output[-3000:]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (tmp_path / "saved" / "iter_0000004" / "optimus_cc" / "rank_00001.pt").exists()


@pytest.mark.parametrize(
    ("death", "code", "reason"),
    [
        pytest.param("os._exit(17)", "exitcode  : 17", "exitcode: 17", id="exits", marks=pytest.mark.full),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            "exitcode  : -9",
            "Signal 9 (SIGKILL)",
            id="is killed",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_that_dies_ends_the_others_with_the_reason(
    death: str, code: str, reason: str, tmp_path: Path, mark: str
) -> None:
    (tmp_path / "train.py").write_text(DYING_SCRIPT.format(death=death))
    flags = [*TWO_STAGES, "--train-iters", "1000"]
    ended = torchrun(["train.py", *flags], tmp_path, mark)
    assert ended.code != 0
    died = float((tmp_path / "time of death").read_text())
    assert ended.seconds_since_epoch - died < 60
    assert len(logged_losses(ended.output)) == 1, "it died in the second iteration"
    # torchrun reports the first failure: which rank, and how it ended.
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)", ended.output), ended.output[-3000:]
    assert code in ended.output and reason in ended.output
    assert processes_of(mark) == []


LEAVING_EARLY = """
import time
import torch.distributed as dist, torch
dist.init_process_group("gloo")
end = dist.destroy_process_group
dist.destroy_process_group = lambda: (end(), print("left in order", flush=True))
dist.barrier()
if dist.get_rank() == 3:
    time.sleep(1)
work = dist.all_reduce(torch.ones(4), async_op=True)
if dist.get_rank() == 3:
    work.wait()
"""


@pytest.mark.full
def test_ranks_that_are_through_before_the_slowest_end_well(tmp_path: Path, mark: str):
    # Without prevention, a rank that ends before the slowest one aborts only now and then. The test therefore asserts
    # that the code which prevents the abort has run.
    script = tmp_path / "leaves.py"
    script.write_text(LEAVING_EARLY)
    ended = torchrun([str(script)], tmp_path, mark, ranks=4)
    assert ended.code == 0, ended.output
    assert ended.output.count("left in order") == 4
