"""submit.sh compare: the flags of both kinds of run, the one line, and a real job of it on two nodes."""

import argparse
import csv
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from optimus_cc_ext.config.flags import add_flags
from scripts.bench.cluster.on_gpu import COLUMNS
from scripts.slurm.compare import line, row
from tests.shell_scripts import ROOT
from tests.slurm.real_slurm import ON_CPUS, Slurm, needs_slurm, slurm, wait_until
from tests.slurm.test_submit import Run, run, submit

__all__ = ["run", "slurm"]  # the fixtures that the tests use


def test_the_launchers_know_each_of_our_flags_and_no_flag_of_megatrons() -> None:
    ours = [flag for action in add_flags(argparse.ArgumentParser())._actions for flag in action.option_strings]
    others = "while read -r f; do [[ $f =~ $compressing || $f =~ $other_ours ]] || echo $f; done"
    script = f"source {ROOT}/scripts/help.sh; {others}"
    listed = subprocess.run(["bash", "-c", script], input="\n".join(ours), capture_output=True, text=True).stdout
    assert set(listed.split()) == {"-h", "--help"}
    megatrons = "--expert-model-parallel-size\n--embedding-path\n--moe-grouped-gemm\n--dp-x\n"
    assert subprocess.run(["bash", "-c", script], input=megatrons, capture_output=True, text=True).stdout == megatrons


def test_vanilla_runs_have_all_flags_but_ours_and_each_run_its_place(run: Run) -> None:
    words = [
        "compare",
        "MODEL=tiny",
        "--gpus-per-node=2",
        "--dry-run",
        "--",
        "--bf16",
        "--dp-compression-format",
        "int4",
    ]
    ended = submit(run, *words, "--compression-metrics", "--lr=1e-4")
    assert ended.code == 0, ended.errors
    sbatch, *runs, last = map(shlex.split, ended.output.splitlines())
    assert sbatch[0] == "sbatch" and "--signal" not in " ".join(sbatch) and "scripts.slurm.compare" in last
    for kind in (1, 2):
        assert "--save" not in runs[2 * kind - 1]
    given = [each[each.index("--bf16") :] for each in runs[::2]]
    end = ["--no-compression-trial", "--exit-signal-handler"]
    vanilla = ["--bf16", "--lr=1e-4", *end]
    compressed = ["--bf16", "--lr=1e-4", "--dp-compression-format", "int4", "--compression-metrics", *end]
    assert given == [vanilla, compressed, compressed, vanilla]
    ids = [each[each.index("--rdzv-id") + 1] for each in runs[1::2]]
    assert ids == [f"optimus-cc-0.{name}" for name in ("1-vanilla", "2-compressed", "3-compressed", "4-vanilla")]
    assert "--optimus-cc balanced" in submit(run, "compare", "MODEL=tiny", "--gpus-per-node=2", "--dry-run").output
    short = submit(run, "compare", "TRAIN_ITERS=11", "--gpus-per-node=2")
    assert short.code == 2 and "TRAIN_ITERS: '11' leaves nothing to measure after ten iterations" in short.errors


def test_the_line_has_the_medians_of_both_after_ten_iterations_and_the_losses(tmp_path: Path) -> None:
    for name, ms in (("1-vanilla", 200), ("2-compressed", 100), ("3-compressed", 140), ("4-vanilla", 200)):
        log = [
            f"0:  iteration {i:8d}/      13 | consumed samples: 1 | elapsed time per iteration (ms): "
            f"{9999 if i <= 10 else ms + i} | lm loss: 5.{i}E+00 | x"
            for i in range(1, 14)
        ]
        (tmp_path / f"{name}.log").write_text("\n".join(log))
    rows = [row(log) for log in sorted(tmp_path.glob("*.log"))]
    assert line(rows).startswith(
        "compare: vanilla 212.0 ms (212.0, 212.0), compressed 132.0 ms (112.0, 152.0): 0.62 of vanilla's time; "
        "loss after 13 iterations: vanilla 5.130000, 5.130000, compressed 5.1"
    )


@pytest.mark.full
@needs_slurm
@pytest.mark.timeout(600)
def test_a_job_compares_vanilla_and_compressed_runs_of_a_tiny_model_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    words = ["compare", "MODEL=tiny", "TRAIN_ITERS=14", "PROCESSES_PER_NODE=1", "OMP_NUM_THREADS=1", "--nodes=2"]
    submit_sh = str(ROOT / "scripts/slurm/submit.sh")
    job = slurm.run(submit_sh, *words, "--output=log", "--parsable", "--", *ON_CPUS, cwd=tmp_path)
    wait_until(lambda: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT"), "the end", 550)
    said = (tmp_path / "log").read_text()
    print(said)
    assert slurm.job(job)["JobState"] == "COMPLETED", said
    assert re.search(
        r"compare: vanilla \S+ ms \(\S+, \S+\), compressed \S+ ms .* of vanilla's time; loss after 14", said
    )
    with (tmp_path / "results/compare/compare.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == COLUMNS and len(rows) == 4
    assert [each["variant"] for each in rows] == ["1-vanilla", "2-compressed", "3-compressed", "4-vanilla"]
    assert rows[0]["loss"] == rows[3]["loss"] and rows[1]["loss"] == rows[2]["loss"] != rows[0]["loss"]
    assert rows[0]["flags"] == "" and rows[1]["flags"] == "--optimus-cc balanced" and float(rows[1]["log MB"]) > 0
