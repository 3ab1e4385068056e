"""Resources and partition of a job of submit.sh, in a real Slurm of two nodes."""

import re
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT
from tests.slurm.real_slurm import ON_CPUS, Slurm, needs_slurm, slurm, wait_until

__all__ = ["slurm"]  # the fixture that the tests use
pytestmark = [pytest.mark.full, needs_slurm]

SUBMIT = str(ROOT / "scripts/slurm/submit.sh")


@pytest.mark.timeout(400)
def test_by_default_training_and_its_step_have_whole_nodes_and_a_misspelt_variable_makes_no_job(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = ["pretrain", "MODEL=tiny", "PIPELINE_PARALLEL=2", "PROCESSES_PER_NODE=1", "CHECKPOINT_DIR=none"]
    options = ["TRAIN_ITERS=100000", "--parsable", "--output=log"]
    refused = slurm.attempt(SUBMIT, *job, "TRAIN_ITER=5", *options, cwd=tmp_path)
    print(refused.stderr)
    assert refused.returncode == 2 and "Write TRAIN_ITERS" in refused.stderr
    assert slurm.run("squeue", "--noheader", "--states=all") == ""

    number = slurm.run(SUBMIT, *job, *options, "--", *ON_CPUS, cwd=tmp_path, SBATCH_PARTITION="urgent")
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and "iteration        3/" in log.read_text(), "the third iteration", 180)
    print(slurm.run("scontrol", "show", "job", number), slurm.run("scontrol", "show", "step", f"{number}.0"), sep="\n")
    had = slurm.job(number)
    assert (had["Partition"], had["NumNodes"], had["NumCPUs"], had["OverSubscribe"]) == ("urgent", "2", "32", "NO")
    assert had["MinMemoryNode"] == "0" and "cpu=32,mem=128G,node=2" in had["TRES"]
    step = slurm.run("scontrol", "--oneliner", "show", "step", f"{number}.0")
    assert re.search(r" TRES=cpu=32,mem=128G,node=2 ", step) and " Tasks=2 " in step
    slurm.run("scancel", number)
