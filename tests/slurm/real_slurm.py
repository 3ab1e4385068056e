"""A real Slurm of three nodes that are apart on this machine, and a training job in it, for the tests here."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.shell_scripts import ROOT, SYSTEM_PATH, why_not_as_root

ITERATIONS = 50
ON_CPUS = [
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--eval-iters", "0"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
]


def why_not() -> str:
    """Return why no Slurm of nodes that are apart can be started here; empty if one can."""
    programs = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "setpriv", "ip", "unshare", "nsenter")
    if reason := why_not_as_root(*programs):
        return f"{reason} (Debian: slurm-wlm, munge, iproute2)"
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        return "no cgroups of version 1 with a freezer"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else f"no namespaces: {tried.stderr.decode().strip()}"


needs_slurm = pytest.mark.skipif(bool(WHY_NOT := why_not()), reason=WHY_NOT)


def wait_until(condition: Callable[[], object], purpose: str, seconds: float) -> None:
    """Poll a condition; fail the test if it takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"after {seconds:.0f} s still not: {purpose}"
        time.sleep(0.2)


class Slurm:
    """Slurm with its configuration in `folder`, used through the commands of a user on the login node."""

    def __init__(self, folder: Path) -> None:
        self.on_login_node = ("nsenter", "--target", (folder / "login.pid").read_text().strip(), "--net", "--uts", "--")
        self.environment = {
            # Other tests make nodes of ranks; these nodes have names of their own.
            **{name: value for name, value in os.environ.items() if name != "OPTIMUS_CC_NODE"},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OPTIMUS_CC_ROOT": str(ROOT),
            "OPTIMUS_CC_DEVICE": "cpu",
            "NETWORK_INTERFACE": "ib0",
            "DOCTOR": "no",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def attempt(self, *command: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command, which may fail."""
        return subprocess.run(
            [*self.on_login_node, *command], cwd=cwd, env=self.environment | environment,
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """Run a command, which must not fail; return its output."""
        done = self.attempt(*command, cwd=cwd, **environment)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        line = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    # The daemons and jobs end with this process, however it ends.
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", str(ROOT / "tests/slurm/with_slurm.sh"), str(folder)],
        env={**os.environ, "PATH": SYSTEM_PATH}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: (folder / "up").exists() or process.poll() is not None, "Slurm is up", 60)
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        yield Slurm(folder)
    finally:
        process.terminate()
        process.communicate(timeout=60)


class Training:
    """Job of pretrain.sbatch in a folder of its own: a tiny GPT, one pipeline stage on each of two nodes."""

    def __init__(
        self, slurm: Slurm, folder: Path, data: dict[str, str], partition: str = "main", **settings: str
    ) -> None:  # fmt: skip
        self.slurm, self.folder = slurm, folder
        folder.mkdir()
        self.number = slurm.run(
            *("sbatch", "--parsable", "--output=log", f"--partition={partition}"),
            *("--oversubscribe", "--mem=1G"),  # two of these jobs fit on a node at a time
            str(ROOT / "scripts/slurm/pretrain.sbatch"),
            # If a part of the corpus had no document, Megatron would wait for ever.
            *("--split", "90,5,5"),
            *("--optimus-cc", "--compressed-backprop-rank", "4", "--compressed-backprop-messages", "all"),
            # Two jobs that start at once must not share Megatron's index of the data: one may find the file half
            # written.
            "--data-cache-path", str(folder / "cache"),
            "--tensorboard-dir", str(folder / "tensorboard"), "--tensorboard-log-interval", "1", *ON_CPUS,
            cwd=folder, MODEL="tiny", PIPELINE_PARALLEL="2", PROCESSES_PER_NODE="1", TRAIN_ITERS=str(ITERATIONS),
            CHECKPOINT_DIR=str(folder / "checkpoints"), OMP_NUM_THREADS="1", **data, **settings,
        )  # fmt: skip

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    @property
    def last_words(self) -> str:
        """Return the last lines of the log for a failure message, because Megatron prints hundreds of lines first."""
        return f"{self.state}\n{self.log[-6000:]}"

    @property
    def iteration(self) -> int:
        """Return the last iteration in the log."""
        return max(map(int, re.findall(r"iteration +(\d+)/", self.log)), default=0)

    @property
    def state(self) -> str:
        return self.slurm.job(self.number)["JobState"]

    def wait_for_iteration(self, iteration: int) -> None:
        wait_until(lambda: self.iteration >= iteration or self.state == "FAILED", f"iteration {iteration}", 180)
        assert self.state == "RUNNING", self.last_words

    def wait_for_start(self, restarts: int) -> None:
        ended = ("PENDING", "COMPLETED", "FAILED")
        wait_until(lambda: self.state in ended, "back in the queue", 150)
        assert self.state == "PENDING", self.last_words
        try:
            wait_until(lambda: f"start {restarts} of job" in self.log, f"start {restarts}", 240)
        except AssertionError as late:
            said = (Path(self.slurm.environment["SLURM_CONF"]).parent / "slurmctld.log").read_text()
            raise AssertionError(f"{late}\n{self.slurm.run('squeue', '--long')}\n{said[-4000:]}") from None

    def wait_for_end(self) -> None:
        wait_until(lambda: self.state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), "the end", 240)
        assert self.state == "COMPLETED", self.last_words

    def losses(self) -> dict[int, set[float]]:
        """Return every loss that was written, as exact as fp32, by iteration."""
        found: dict[int, set[float]] = {}
        for events in (self.folder / "tensorboard").glob("*tfevents*"):
            accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
            accumulator.Reload()
            if "lm loss" in accumulator.Tags()["scalars"]:
                for event in accumulator.Scalars("lm loss"):
                    found.setdefault(event.step, set()).add(event.value)
        return found


def prepare_data(slurm: Slurm, folder: Path) -> dict[str, str]:
    """Make a corpus by prepare_data.sbatch; return the variables of pretrain_gpt.sh that name it."""
    words = (ROOT / "README.md").read_text().split()
    with (folder / "corpus.jsonl").open("w") as corpus:
        for start in range(200):
            corpus.write(json.dumps({"text": " ".join(words[start : start + 200])}) + "\n")
    slurm.run(
        *(
            "sbatch",
            "--wait",
            "--output=data.log",
            "--cpus-per-task=2",
            str(ROOT / "scripts/slurm/prepare_data.sbatch"),
        ),
        *("--input", "corpus.jsonl", "--output", str(folder / "corpus"), "--vocab-size", "500", "--workers", "1"),
        cwd=folder,
    )
    said = (folder / "data.log").read_text()
    prefix, tokenizer = (re.search(rf"{flag} (\S+)", said) for flag in ("--data-path", "--tokenizer-model"))
    assert prefix and tokenizer, said
    return {"DATA_PATH": prefix[1], "TOKENIZER_MODEL": tokenizer[1]}
