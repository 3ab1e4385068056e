"""submit.sh paper all and collect: every experiment of the paper as a job, with its nodes, hours and bytes."""

import shlex
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT, run_script
from tests.slurm.real_slurm import ON_CPUS, Slurm, needs_slurm, slurm, wait_until
from tests.slurm.test_submit import Run, run, submit

__all__ = ["run", "slurm"]  # the fixtures that the tests use
SUBMIT = str(ROOT / "scripts/slurm/submit.sh")


def test_all_experiments_are_listed_with_hours_and_bytes_and_a_line_for_each(run: Run) -> None:
    words = ["--dry-run", "--gpus-per-node=8", "DATA_PATH=mock", "--", "--bf16"]
    ended = submit(run, "paper", "all", *words)
    assert ended.code == 0, ended.errors
    lines = ended.output.splitlines()
    rows = {name: numbers for name, *numbers in map(str.split, lines[1:33])}
    # 230,000 iterations of 1.69 and 4.02 s on 128 GPUs; 24 checkpoints of 28.8 and 99 GB.
    assert rows["table2/2.5b-cb"] == ["16", "230000", "13820.4", "0.69"]
    assert rows["table2/8.3b-cb-fe-sc"] == ["16", "230000", "32874.7", "2.39"]
    assert rows["figure10/335m-cb"][:2] == ["1", "10"] and len(rows) == 32
    assert lines[33].split()[:2] == ["32", "trainings"] and float(lines[33].split()[3]) == pytest.approx(204_294, abs=2)
    files = {str(path.relative_to(ROOT / "scripts/paper"))[:-3] for path in (ROOT / "scripts/paper").glob("*/*.sh")}
    jobs = [shlex.split(line) for line in lines[34:]]
    assert {job[2] for job in jobs} == files | {"figure14"} == set(rows) | {"figure14"}
    assert {tuple(job[3:]) for job in jobs} == {tuple(words[1:]), tuple(words[1:-2])}, "figure 14 takes no flags"


def test_a_pattern_chooses_and_what_one_job_is_refused_for_ends_all(run: Run, tmp_path: Path) -> None:
    chosen = submit(run, "paper", "all", "--only", "figure12/2.5b-cb*", "--gpus-per-node=8", "DATA_PATH=mock")
    assert chosen.code == 0 and chosen.output.count("sbatch\n--export") == 2, chosen.errors
    assert "scripts/slurm/submit.sh paper collect" in chosen.errors
    none = submit(run, "paper", "all", "--only=figure13/*")
    assert none.code == 2 and "--only: no experiment fits 'figure13/*'. Names are such as table2/2.5b-cb" in none.errors
    without_data = submit(run, "paper", "all", "--gpus-per-node=8")
    assert without_data.code == 2 and "sbatch\n" not in without_data.output
    assert "does not exist" in without_data.errors and without_data.errors.count("error: ") == 1


@pytest.mark.parametrize("name", ["figure14", "collect"])
def test_figure_14_and_the_tables_are_jobs_of_one_node(name: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "work/results/paper").mkdir(parents=True)
    ended = submit(run, "paper", name, "--dry-run", "--gpus-per-node=1")
    sbatch, srun = map(shlex.split, ended.output.splitlines())
    assert "--nodes=1" in sbatch and sbatch[-1] == name
    words = ["-m", f"scripts.paper.{name}", "--scale", "paper", "--results", str(tmp_path / "work/results/paper")]
    assert srun[-6:] == words and "--ntasks=1" in srun, ended.errors


def test_all_experiments_at_once_on_a_login_node_name_the_command_that_submits_them(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ended = run_script("paper/all.sh", "--only", "table2/*", env=path)
    assert ended.code == 2 and "scripts/slurm/submit.sh paper all --only 'table2/*' --gpus-per-node=8" in ended.errors
    in_a_job = run_script("paper/all.sh", "--only", "none", env={**path, "SLURM_JOB_ID": "1"})
    assert "no experiment fits 'none'" in in_a_job.errors


@pytest.mark.full
@needs_slurm
@pytest.mark.timeout(900)
def test_five_tiny_experiments_go_through_slurm_to_the_collected_page(slurm: Slurm, tmp_path: Path) -> None:
    words = ["PROCESSES_PER_NODE=2", "OMP_NUM_THREADS=1", "SCALE=tiny", "TRAIN_ITERS=4", "--mem=1G", "--oversubscribe"]
    given = [*words, "--nodes=2", "--parsable", "--", *ON_CPUS[:-2]]
    jobs = slurm.run(SUBMIT, "paper", "all", "--only", "table2/2.5b-*", *given, cwd=tmp_path).splitlines()
    jobs = [line for line in jobs if line.isdigit()]
    assert len(jobs) == 5
    states = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"}
    wait_until(lambda: {slurm.job(job)["JobState"] for job in jobs} <= states, "the end of all", 700)
    assert {slurm.job(job)["JobState"] for job in jobs} == {"COMPLETED"}
    slurm.run(SUBMIT, "paper", "collect", "SCALE=tiny", "--mem=1G", "--wait", "--output=log", cwd=tmp_path)
    report = tmp_path / "results/paper-tiny/report"
    assert (report / "index.html").exists() and len((report / "table2.csv").read_text().splitlines()) == 6
    print((report / "report.md").read_text()[:2000])
