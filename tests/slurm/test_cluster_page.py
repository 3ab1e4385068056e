"""docs/cluster.md from top to bottom: each command of the page, unchanged, on a cluster of stand-ins.

`sbatch` runs the batch script with Slurm's variables, as the job would. `srun` prints its arguments, and really
prepares the data, because the page says that later steps take their values from its output. `pytest -s` shows each
command and its output.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT
from tests.slurm.test_submit import PROGRAMS, PYXIS

SBATCH = """
nodes=1 gpus="" words="$*"
while [[ "$1" != *.sbatch ]]; do
  case "$1" in --nodes=*) nodes="${1#*=}" ;; --gpus-per-node=* | --gpus=*) gpus="${1#*=}" ;; esac
  shift
done
script="$1"; shift
[[ " $words " == *" --nodes="* ]] || nodes="$(sed -n 's/^#SBATCH --nodes=//p' "$script")"
echo "sbatch $words"
export SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES="$nodes" SLURM_JOB_NODELIST="n[1-$nodes]" SLURM_JOB_CPUS_PER_NODE=64
[[ -z "$gpus" ]] || export SLURM_GPUS_ON_NODE="$gpus"
exec bash "$script" "$@"
"""
SRUN = f"""{PYXIS}
echo "srun $*"
for word; do
  shift
  [[ "$word" != optimus_cc_ext.tools.data ]] || exec python -m optimus_cc_ext.tools.data "$@"
done
"""


def commands() -> list[str]:
    """Return the commands in the page's blocks and complete commands in its sentences, with continued lines joined."""
    page = (ROOT / "docs/cluster.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    shown = [line.strip() for line in lines if line.strip() and not line.startswith(("#", "export "))]
    told = re.findall(r"`(submit\.sh (?:paper|JOB --help)[^`]*)`", page)
    return shown + [f"scripts/slurm/{line}" for line in told]


@pytest.mark.ci
def test_each_command_of_the_page_does_what_the_page_says(tmp_path: Path) -> None:
    programs, site = tmp_path / "bin", tmp_path / "site"
    programs.mkdir()
    site.mkdir()
    stand_ins = PROGRAMS | {"sbatch": SBATCH, "srun": SRUN, "scontrol": "seq --format n%g 16"}
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    # Files that the page presupposes: a text, results of training to evaluate and collect, and the reader's own data.
    (site / "corpus.jsonl").write_text('{"text": "It is a truth universally acknowledged."}\n' * 50)
    (site / "held_out.txt").write_text("It is a truth.\n")
    checkpoint = site / "checkpoints/gpt-2.5b-balanced"
    for folder in (checkpoint, site / "data", site / "shared", site / "results/paper"):
        folder.mkdir(parents=True)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("10")
    for name in ("my_text_document.idx", "my_text_document.bin", "vocab.json", "merges.txt"):
        (site / "data" / name).touch()
    path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
    # This test builds no image, so it must pass on a machine that has little free disk space.
    environment = {"PATH": path, "HOME": str(site), "OPTIMUS_CC_DEVICE": "cpu", "SPACE_GB": "0", "DOCTOR": "no"}
    values: dict[str, str] = {}
    steps: list[str] = []

    for line in commands():
        # The page's dots stand for the output of an earlier step, /data and /shared for folders of the reader.
        command = re.sub(r"\b([A-Z_]+)=\.\.\.", lambda found, known=values: f"{found[1]}={known[found[1]]}", line)
        command = re.sub(r"(?<=[ =])/(data|shared)/", rf"{site}/\1/", command).replace(" JOB ", " pretrain ")
        command = re.sub(r"(?<!\S)(\./)?scripts/", f"{ROOT}/scripts/", command)
        if " paper " in command:
            command += " " + shlex.join(f"{name}={value}" for name, value in values.items())
        if "submit.sh" not in command and "setup_env.sh" not in command:
            command += " --dry-run"  # without Slurm this command would start a training
        ended = subprocess.run(
            ["bash", "-c", command], cwd=site, env=environment, text=True, capture_output=True, timeout=120
        )
        print(f"$ {line}\n{ended.stdout}{ended.stderr}[exit {ended.returncode}]\n")
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
        steps += [word for word in ended.stdout.splitlines() if word.startswith("srun ")]
        if " prepare_data " in line:
            flags = re.findall(r"--(data-path|tokenizer-model) (\S+)", ended.stdout.partition("done: ")[2])
            values = {flag.upper().replace("-", "_"): value for flag, value in flags}

    assert (site / "optimus-cc.sqsh").exists()
    # The runs that compare.sbatch compares are in logs of their own.
    programs_of_steps = (
        "optimus_cc_ext.tools.data",
        "preflight.py",
        "pretrain_gpt.sh",
        "convert.sh",
        "perplexity.sh",
        "tasks.sh",
        "scripts.slurm.compare",
        "table2/2.5b-cb.sh",
        "scripts.paper.collect",
    )
    for step, program in zip(steps, programs_of_steps, strict=True):
        assert program in step, step
