"""Jobs on nodes that are apart: one folder for two of them, allocations in allocations, GPUs, short limits."""

import re
import time
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT
from tests.slurm.real_slurm import ON_CPUS, Slurm, needs_slurm, slurm, wait_until

__all__ = ["slurm"]  # the fixture that the tests use
pytestmark = [pytest.mark.full, needs_slurm]

SUBMIT = str(ROOT / "scripts/slurm/submit.sh")
ENDLESS = ["pretrain", "MODEL=tiny", "PIPELINE_PARALLEL=2", "TRAIN_ITERS=100000", "--parsable"]
HALF = ["--oversubscribe", "--mem=1G", "--output=%j.log"]  # two such jobs fit on a node at a time


def state(slurm: Slurm, job: str) -> str:
    return slurm.job(job)["JobState"]


def trains(log: Path, iteration: int = 1) -> bool:
    return log.exists() and re.search(rf"iteration +{iteration}/", log.read_text()) is not None


def test_the_nodes_have_a_network_a_name_and_a_tmp_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    script = "uname -n; hostname -I; ls -A /tmp; touch /tmp/of-this-node; ls /sys/class/net | xargs; cat $0"
    (tmp_path / "look").write_text(f"#!/bin/sh\n{script} | wc -l\n")
    said = slurm.run(*("srun", "--nodes=2", "--mem=1G", "--label", "sh", str(tmp_path / "look")), cwd=tmp_path)
    lines = {node: [line[3:] for line in said.splitlines() if line.startswith(f"{node}: ")] for node in "01"}
    assert lines["0"][0] != lines["1"][0] and {lines["0"][1], lines["1"][1]} == {"10.77.0.11 ", "10.77.0.12 "}, said
    assert "of-this-node" not in said.replace("touch /tmp/of-this-node", "")
    assert lines["0"][-2:] == ["ib0 lo", "2"], "both see the test's folder"


@pytest.mark.timeout(300)
def test_two_jobs_with_one_folder_are_not_both_trained_and_by_default_they_have_two(
    slurm: Slurm, tmp_path: Path
) -> None:
    words = [*ENDLESS, "PROCESSES_PER_NODE=2", "OMP_NUM_THREADS=1", "--nodes=1"]
    one = [*words, *HALF, "CHECKPOINT_DIR=shared"]
    # Both are accepted while neither has started.
    held = [slurm.run(SUBMIT, *one, "--hold", "--", *ON_CPUS, *more, cwd=tmp_path) for more in ([], ["--optimus-cc"])]
    slurm.run("scontrol", "release", ",".join(held))
    wait_until(lambda: any(trains(tmp_path / f"{job}.log") for job in held), "iteration 1", 180)
    wait_until(lambda: "FAILED" in {state(slurm, job) for job in held}, "the refusal", 60)
    [refused] = [job for job in held if state(slurm, job) == "FAILED"]
    [owner] = [job for job in held if job != refused]
    assert state(slurm, owner) == "RUNNING" and slurm.job(refused)["ExitCode"] == "2:0"
    assert f"job {owner}, which is RUNNING, trains in" in (tmp_path / f"{refused}.log").read_text()
    assert (tmp_path / "shared/owner-job.txt").read_text() == f"{owner}\n"
    third = slurm.attempt(SUBMIT, *one, "--", *ON_CPUS, cwd=tmp_path)
    assert third.returncode == 2 and f"CHECKPOINT_DIR: job {owner}, which is RUNNING" in third.stderr
    waits = slurm.run(SUBMIT, *one, f"--dependency=afterany:{owner}", "--", *ON_CPUS, cwd=tmp_path)
    slurm.run("scancel", waits, owner)
    # The comparison that a user makes: the same line, with the flag and without.
    two = [slurm.run(SUBMIT, *words, *HALF, "--hold", "--", *ON_CPUS, *more, cwd=tmp_path)
           for more in ([], ["--optimus-cc", "balanced"])]  # fmt: skip
    slurm.run("scontrol", "release", ",".join(two))
    wait_until(lambda: all(trains(tmp_path / f"{job}.log") for job in two), "iteration 1 of both", 180)
    slurm.run("scancel", *two)
    for job, preset in zip(two, ("vanilla", "balanced"), strict=True):
        assert (tmp_path / f"checkpoints/gpt-tiny-{preset}/owner-job.txt").read_text() == f"{job}\n"


@pytest.mark.parametrize("program", ["submit.sh", "sbatch"])
def test_a_job_from_inside_an_allocation_of_one_cpu_has_all_cpus_of_its_node(
    program: str, slurm: Slurm, tmp_path: Path
) -> None:
    options = ["--parsable", "--nodes=1", "--output=%j.log"]
    words = {
        "submit.sh": [SUBMIT, "pretrain", "--nodes=1", "--parsable"],
        "sbatch": ["sbatch", *options, str(ROOT / "scripts/slurm/pretrain.sbatch")],
    }[program]
    settings = {"MODEL": "tiny", "PROCESSES_PER_NODE": "1", "CHECKPOINT_DIR": "none", "TRAIN_ITERS": "100000"}
    flags = [*(["--"] if program == "submit.sh" else []), *ON_CPUS]
    inside = ["salloc", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=1G", "--quiet"]
    job = slurm.run(*inside, *words, *flags, cwd=tmp_path, **settings).splitlines()[-1]
    wait_until(lambda: "StepId" in slurm.attempt("scontrol", "show", "step", f"{job}.0").stdout, "its step", 60)
    step = slurm.run("scontrol", "--oneliner", "show", "step", f"{job}.0")
    print(step)
    slurm.run("scancel", job)
    assert " CPUs=16 " in step and "TRES=cpu=16,mem=64G,node=1" in step


def test_two_of_a_nodes_four_gpus_are_two_ranks_of_it_in_preflight_and_training(slurm: Slurm, tmp_path: Path) -> None:
    # The batch script runs on the node of four, and sees all of them.
    words = ["--nodes=2", "--gpus-per-node=2", "--wait", "--output=%x.log", "OMP_NUM_THREADS=1", "PIPELINE_PARALLEL=2"]
    slurm.run(SUBMIT, "preflight", *words, cwd=tmp_path)
    said = (tmp_path / "optimus-cc-preflight.log").read_text()
    assert "placement tp-cp-dp-pp, 2 ranks a node" in said
    words.remove("--wait")
    job = slurm.run(SUBMIT, *ENDLESS, "CHECKPOINT_DIR=none", *words, "--", *ON_CPUS, cwd=tmp_path)
    log = tmp_path / "optimus-cc.log"
    wait_until(lambda: (log.exists() and "placement" in log.read_text()) or state(slurm, job) == "FAILED", "ranks", 120)
    slurm.run("scancel", job)
    assert "placement tp-cp-dp-pp, 2 ranks a node" in log.read_text()
    unequal = slurm.attempt(SUBMIT, "pretrain", "--nodes=2", "--gpus=5", "--", *ON_CPUS, cwd=tmp_path)
    assert unequal.returncode == 2 and "5 GPUs are not the same number on each of 2 nodes" in unequal.stderr
    too_many = slurm.attempt(SUBMIT, "pretrain", "--nodes=2", "--gpus-per-node=4", "--", *ON_CPUS, cwd=tmp_path)
    assert too_many.returncode != 0 and "not available" in too_many.stderr, "Slurm itself refuses nodes of 4 and 2"


@pytest.mark.timeout(400)
def test_a_job_of_two_minutes_saves_and_requeues_itself(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm looks at limits twice a minute, so the signal may come before a rank has its handler. It kills what has not
    ended 120 s after the limit.
    """
    begin = time.monotonic()
    words = [*ENDLESS, "PROCESSES_PER_NODE=2", "OMP_NUM_THREADS=1", "--nodes=1", "--time=2", "--output=log"]
    job = slurm.run(SUBMIT, *words, "CHECKPOINT_DIR=kept", "--", *ON_CPUS, cwd=tmp_path)
    wait_until(lambda: slurm.job(job)["Restarts"] == "1" or state(slurm, job) in ("TIMEOUT", "FAILED"), "its end", 300)
    said = (tmp_path / "log").read_text()
    print(f"requeued after {time.monotonic() - begin:.0f} s")
    slurm.attempt("scancel", job)
    assert "saved; back into the queue" in said, said[-3000:]
    assert int((tmp_path / "kept/latest_checkpointed_iteration.txt").read_text()) > 0
    long = slurm.attempt(SUBMIT, *ENDLESS, "PROCESSES_PER_NODE=2", "--partition=short", "--", *ON_CPUS, cwd=tmp_path)
    assert long.returncode == 2 and "--time: 24:00:00 is more than 2:00:00, the limit of partition short" in long.stderr


def test_preflight_says_a_nodes_fault_last_and_refuses_tensor_groups_across_nodes(slurm: Slurm, tmp_path: Path) -> None:
    words = ["sbatch", "--wait", "--nodes=2", "--output=log", str(ROOT / "scripts/slurm/preflight.sbatch")]
    across = slurm.attempt(*words, cwd=tmp_path, TENSOR_PARALLEL="4", PROCESSES_PER_NODE="2")
    said = (tmp_path / "log").read_text()
    assert across.returncode == 2 and "TENSOR_PARALLEL: groups of 4 ranks cross nodes of 2" in said
