"""The sbatch files in a real Slurm of two nodes: a preempted or requeued job ends as an undisturbed one does."""

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
from transformers import AutoTokenizer

from tests.shell_scripts import ROOT, SYSTEM_PATH, why_not_as_root

ITERATIONS = 50
ON_CPUS = [
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--eval-iters", "0"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
]
WHY_NOT = why_not_as_root("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "setpriv")
needs_slurm = pytest.mark.skipif(bool(WHY_NOT), reason=f"{WHY_NOT} (Debian: slurm-wlm, munge)")
pytestmark = [pytest.mark.full, needs_slurm]


def wait_until(condition: Callable[[], object], purpose: str, seconds: float) -> None:
    """Poll a condition; fail the test if it takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"after {seconds:.0f} s still not: {purpose}"
        time.sleep(0.2)


class Slurm:
    """Slurm with its configuration in `folder`, used through the commands of a user."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OPTIMUS_CC_ROOT": str(ROOT),
            "OPTIMUS_CC_DEVICE": "cpu",
            # Both nodes are this machine, and no name server knows their names.
            "MASTER_ADDR": "127.0.0.1",
            "NETWORK_INTERFACE": "lo",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """Run a command; return its output. Raises CalledProcessError if it fails."""
        done = subprocess.run(
            command, cwd=cwd, env=self.environment | environment, capture_output=True, text=True, timeout=200
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        line = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    up = folder / "up"
    # The daemons and jobs end with this process, however it ends.
    process = subprocess.Popen(
        [
            *("setpriv", "--pdeathsig", "TERM", str(ROOT / "tests/slurm/with_slurm.sh"), str(folder)),
            *("sh", "-c", f"touch {up}; exec sleep 1200"),
        ],
        env={**os.environ, "PATH": SYSTEM_PATH}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: up.exists() or process.poll() is not None, "Slurm is up", 60)
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


@pytest.mark.timeout(900)
def test_a_job_requeued_and_then_preempted_ends_at_the_very_loss_of_one_left_alone(
    slurm: Slurm, tmp_path: Path
) -> None:  # fmt: skip
    data = prepare_data(slurm, tmp_path)
    # Nothing preempts the partition "urgent". Both run at the same time.
    alone = Training(slurm, tmp_path / "alone", data, "urgent")
    job = Training(slurm, tmp_path / "requeued", data)

    job.wait_for_iteration(5)
    slurm.run("scontrol", "requeue", job.number)
    job.wait_for_start(1)
    first_stop = job.iteration

    alone.wait_for_end()
    job.wait_for_iteration(first_stop + 5)
    # The urgent job needs both nodes, which belong to the other job now.
    urgent = slurm.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=srun hostname", cwd=tmp_path
    )
    job.wait_for_start(2)
    second_stop = job.iteration
    job.wait_for_end()

    accounting = slurm.run("sacct", "--completion", "--format=JobID,JobName,Partition,State,NodeList")
    print(f"stopped after iterations {first_stop} and {second_stop} of {ITERATIONS}", accounting, sep="\n")
    print(slurm.run("scontrol", "show", "job", job.number))
    lost = [loss for losses in (alone.losses(), job.losses()) for loss in losses[ITERATIONS]]
    print("last losses, left alone and requeued:", lost)

    assert slurm.job(urgent)["JobState"] == "COMPLETED"
    assert slurm.job(job.number)["Restarts"] == "2"
    assert 5 <= first_stop < second_stop < ITERATIONS
    # No iteration was trained twice or left out: each stop saved the iteration in which it came.
    assert job.log.count(f"iteration {first_stop:8d}/") == 1
    assert job.losses() == alone.losses()
    assert {len(values) for values in job.losses().values()} == {1} and len(job.losses()) == ITERATIONS

    # The last step of the way: the trained model becomes a model of transformers, and has a perplexity, if
    # scripts/eval/perplexity.sh has fetched lm-evaluation-harness here before.
    held_out = (ROOT / "CHANGELOG.md").read_text()
    (tmp_path / "held_out.txt").write_text(held_out)
    text = {"TEXT": "held_out.txt"} if any((ROOT / ".eval").glob("*/lm_eval")) else {}
    slurm.run(
        *("sbatch", "--wait", "--output=evaluation.log", str(ROOT / "scripts/slurm/evaluate.sbatch")),
        cwd=tmp_path, CHECKPOINT=str(job.folder / "checkpoints"), MODEL_OUTPUT="model", **text,
    )  # fmt: skip
    said = (tmp_path / "evaluation.log").read_text()
    assert (tmp_path / "model" / "config.json").exists(), said
    if text:
        bits_per_byte = re.search(r"\|bits_per_byte *\|\D*([\d.]+)", said)
        assert bits_per_byte, said
        words = AutoTokenizer.from_pretrained(tmp_path / "model")
        bits_per_word = float(bits_per_byte[1]) * len(held_out.encode()) / len(words(held_out)["input_ids"])
        # The vocabulary has 500 words, so a model that has learned nothing has a perplexity of 500.
        assert 1 < 2**bits_per_word < 500, said


def test_evaluation_without_a_checkpoint_says_what_to_give(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/slurm/evaluate.sbatch")], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OPTIMUS_CC_ROOT": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "CHECKPOINT: it is not set" in done.stderr
