"""Jobs of submit.sh in a real Slurm of two nodes: a rank's death, the paper's experiments, preflight, a dry run."""

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT
from tests.slurm.real_slurm import ITERATIONS, ON_CPUS, Slurm, Training, needs_slurm, prepare_data, slurm, wait_until

__all__ = ["slurm"]  # the fixture that the tests use
pytestmark = [pytest.mark.full, needs_slurm]

SUBMIT = str(ROOT / "scripts/slurm/submit.sh")


def kill_a_rank(job: str) -> None:
    """Kill one rank of a job, as a broken GPU would."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environment.read_bytes().split(b"\0")
        except OSError:
            continue
        step = [v for v in variables if v.startswith(f"OPTIMUS_CC_STEP={job}.".encode())]
        if step and b"LOCAL_RANK=0" in variables and b"RANK=1" in variables:
            os.kill(int(environment.parent.name), signal.SIGKILL)
            return
    raise AssertionError(f"job {job} has no rank 1")


@pytest.mark.timeout(900)
def test_a_rank_that_dies_after_a_save_restarts_the_job_and_one_that_dies_before_any_ends_it(
    slurm: Slurm, tmp_path: Path
) -> None:
    data = prepare_data(slurm, tmp_path)
    lost = Training(slurm, tmp_path / "before", data, SAVE_INTERVAL="1000")
    lost.wait_for_iteration(3)
    kill_a_rank(lost.number)
    wait_until(lambda: lost.state != "RUNNING", "the end", 240)
    assert lost.state == "FAILED" and slurm.job(lost.number)["Restarts"] == "0", lost.last_words
    assert "before a checkpoint was saved in this start: not started again" in lost.log

    alone = Training(slurm, tmp_path / "alone", data, "urgent", SAVE_INTERVAL="10")
    job = Training(slurm, tmp_path / "after", data, SAVE_INTERVAL="10")
    job.wait_for_iteration(12)
    kill_a_rank(job.number)
    job.wait_for_start(1)
    job.wait_for_end()
    alone.wait_for_end()
    [line] = (job.folder / f"checkpoints/failures-{job.number}.txt").read_text().splitlines()
    print(line, slurm.run("sacct", "--completion", "--format=JobID,JobName,Partition,State,NodeList"), sep="\n")
    assert "restart 1 of 3 goes on after iteration 10" in job.log
    assert slurm.job(job.number)["Restarts"] == "1"
    assert job.losses()[ITERATIONS] == alone.losses()[ITERATIONS]


@pytest.mark.timeout(600)
def test_an_experiment_of_the_paper_requeued_ends_at_the_very_loss_of_one_left_alone(
    slurm: Slurm, tmp_path: Path
) -> None:
    """The experiment runs at the scale tiny with more iterations, so that there is time to interrupt it."""

    def submit(name: str, partition: str) -> tuple[str, Path]:
        folder = tmp_path / name
        folder.mkdir()
        words = ["paper", "table2/2.5b-cb", "SCALE=tiny", "TRAIN_ITERS=40", "PROCESSES_PER_NODE=2", "--nodes=2"]
        options = ["--parsable", "--output=log", "--oversubscribe", "--mem=1G", f"--partition={partition}"]
        number = slurm.run(SUBMIT, *words, *options, "--", *ON_CPUS[:-2], cwd=folder, OMP_NUM_THREADS="1")
        return number, folder / "log"

    def iteration(log: Path) -> int:
        return max(map(int, re.findall(r"iteration +(\d+)/", log.read_text() if log.exists() else "")), default=0)

    requeued, log = submit("requeued", "main")
    wait_until(lambda: iteration(log) >= 5, "iteration 5", 180)
    slurm.run("scontrol", "requeue", requeued)
    alone, other = submit("alone", "urgent")

    def states() -> set[str]:
        return {slurm.job(number)["JobState"] for number in (alone, requeued)}

    wait_until(lambda: states() <= {"COMPLETED", "FAILED"}, "the end of both", 300)
    assert states() == {"COMPLETED"}, log.read_text()[-4000:]
    last = [re.findall(r"iteration +40/ +40 .*?lm loss: (\S+)", path.read_text()) for path in (log, other)]
    print("last losses, requeued and left alone:", last)
    assert last[0] == last[1] and len(last[0]) == 1
    assert slurm.job(requeued)["Restarts"] == "1"


def test_a_dry_run_leaves_the_queue_as_it_was_and_prints_the_step_that_a_job_starts(
    slurm: Slurm, tmp_path: Path
) -> None:
    before = slurm.run("squeue", "--noheader", "--states=all")
    words = ["pretrain", "MODEL=tiny", "PIPELINE_PARALLEL=2", "PROCESSES_PER_NODE=1", "CHECKPOINT_DIR=none"]
    printed = slurm.run(SUBMIT, *words, "--nodes=2", "--", "--dry-run", *ON_CPUS, cwd=tmp_path)
    sbatch, srun, torchrun = map(shlex.split, printed.splitlines())
    assert slurm.run("squeue", "--noheader", "--states=all") == before
    assert (sbatch[0], srun[0], torchrun[0]) == ("sbatch", "srun", "env")
    assert list(tmp_path.iterdir()) == []
    # A job of two nodes accepts the printed options of srun.
    allocation = ("salloc", "--nodes=2", "--ntasks-per-node=1", "--mem=1G", "--oversubscribe")
    slurm.run(*allocation, *srun[:1], *srun[2:7], "true")


def test_preflight_measures_what_the_planner_reads_and_names_an_interface_that_is_not_there(
    slurm: Slurm, tmp_path: Path
) -> None:
    words = [SUBMIT, "preflight", "PROCESSES_PER_NODE=2", "PIPELINE_PARALLEL=2", "--nodes=2", "--wait", "--output=log"]
    options = ["--oversubscribe", "--mem=1G"]
    slurm.run(*words, *options, cwd=tmp_path, OMP_NUM_THREADS="1")
    said = (tmp_path / "log").read_text()
    print(said)
    assert "placement tp-cp-dp-pp, 2 ranks a node: data-parallel groups stay inside nodes, 1 of 1 pipeline" in said
    assert "pipeline-parallel all-reduce: at least" in said and said.count("GB/s to its neighbour") == 2
    measured = json.loads((tmp_path / "preflight.json").read_text())
    assert measured["gpus_per_node"] == 2 and measured["node_rate"] > 0 and measured["hop"] > 0
    planned = subprocess.run(
        [
            *("optimus-cc", "plan", "--cluster=preflight.json", "--nodes=2", "--model=2.5b", "--"),
            *("--pipeline-model-parallel-size=2", "--global-batch-size=64", "--micro-batch-size=1"),
        ],
        cwd=tmp_path, env=slurm.environment, capture_output=True, text=True,
    )  # fmt: skip
    print(planned.stdout)
    assert planned.returncode == 0, planned.stderr

    failed = slurm.attempt(*words, *options, "NETWORK_INTERFACE=ib9", cwd=tmp_path)
    assert failed.returncode != 0
    [*_, last] = (tmp_path / "log").read_text().splitlines()
    assert "NETWORK_INTERFACE:" in last and "has no interface 'ib9'. Give one of ib0, lo." in last
