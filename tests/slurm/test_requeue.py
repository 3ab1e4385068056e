"""The sbatch files in a real Slurm of two nodes: a preempted or requeued job ends as an undisturbed one does."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.shell_scripts import ROOT
from tests.slurm.real_slurm import ITERATIONS, Slurm, Training, needs_slurm, prepare_data, slurm

__all__ = ["slurm"]  # the fixture that the tests use
pytestmark = [pytest.mark.full, needs_slurm]


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
