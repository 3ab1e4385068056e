"""The GPU check on a machine without a GPU: its refusals, and its dry run."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimus_cc_ext.techniques.messages import LowRankMessages
from optimus_cc_ext.techniques.transfer import Transfer
from optimus_cc_ext.tools.doctor.gpu import NEEDED_BYTES, FoundGpu, problem
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import world_of_one
from scripts.gpu_check.checks import CHECKS, Check
from scripts.gpu_check.nccl import CONFIGURATIONS
from tests.shell_scripts import ROOT

GOOD = FoundGpu(built_for="13.0", driver=13010, devices=1, free=NEEDED_BYTES, compiler="/usr/bin/gcc")


@pytest.mark.parametrize(
    "lacks, said",
    [
        ({"built_for": None}, "built for CPUs only: install a PyTorch for CUDA"),
        ({"driver": None}, "no NVIDIA driver: install one"),
        ({"driver": 12040}, "supports CUDA up to 12.4, and PyTorch is built for 13.0: update the driver"),
        ({"devices": 0}, "PyTorch sees no GPU: check nvidia-smi"),
        ({"compiler": None}, "Triton finds no C compiler: install gcc"),
        ({"free": 3 << 30}, "3.0 GiB of the GPU's memory are free, and 8 are needed: end other processes"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_a_machine_lacks_is_said_with_the_cure(lacks: dict, said: str) -> None:
    assert problem(GOOD) is None and problem(replace(GOOD, driver=13000)) is None
    assert said in (problem(replace(GOOD, **lacks)) or "")


def test_wheels_are_not_blamed_for_a_python_that_they_are_not_for(tmp_path: Path) -> None:
    (old := tmp_path / "python3.11").write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts/gpu_check.sh", "--dry-run-on-cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=30,
        env=os.environ | {"OPTIMUS_CC_WHEELS": str(tmp_path), "OPTIMUS_CC_PYTHON": str(old)},
    )  # fmt: skip
    assert done.returncode == 2
    assert f"{old} is not Python 3.12 or 3.13. Set OPTIMUS_CC_PYTHON" in done.stderr and "lacks" not in done.stderr


def test_all_checks_together_end_within_eight_minutes_and_each_says_what_it_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_check.TOTAL == 8 * 60 and [name for name, check in CHECKS.items() if not check.long][-1] == "bench", (
        "what measures has what is left"
    )
    assert all(check.claim.endswith(".") for check in CHECKS.values())
    monkeypatch.setattr(gpu_check, "TOTAL", 0)
    assert dry_run(tmp_path, "messages") == 1
    assert "not finished after 0 s" in (tmp_path / "gpu_check.md").read_text()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_four_ranks_train_every_configuration_in_one_process_each(tmp_path: Path) -> None:
    assert dry_run(tmp_path, "nccl") == 0, (tmp_path / "nccl" / "log.txt").read_text()[-2000:]
    (check,) = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
    rows = {row["training"]: row for row in check["rows"]}
    assert len(rows) == len(CONFIGURATIONS)
    for name in ("vanilla again", "everything off", "pass-through blocks", "resumed"):
        assert rows[name]["bits"] == "equal", "on a CPU equal trainings have equal bits"
    for name in ("balanced", "experts, recomputed", "two levels", "interleaved, overlapped"):
        assert rows[name]["bits"] == "" and rows[name]["difference, %"] != 0, f"{name} is compressed"


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_why_and_how_to_go_on(tmp_path: Path) -> None:
    ended = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", "--output", str(tmp_path / "out")], env=os.environ, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and "--dry-run-on-cpu" in ended.stderr and ended.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def dry_run(output: Path, *only: str) -> int:
    return gpu_check.main(["--dry-run-on-cpu", "--output", str(output), "--only", *only])


@pytest.mark.ci
def test_a_dry_run_measures_what_a_cpu_can_and_marks_the_rest_as_missing(tmp_path: Path) -> None:
    assert dry_run(tmp_path, "messages", "capture") == 0
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    rows = {check["name"]: check["rows"] for check in found["checks"]}
    assert rows["messages"] == [{"case": "100 messages, bf16", "bits": "equal", "over NCCL": None}]
    assert rows["capture"][0]["ms"] is None
    page = (tmp_path / "gpu_check.md").read_text()
    assert "missing" in page and "`scripts/gpu_check.sh` gives them" in page and "## messages: holds" in page


@pytest.mark.full
def test_every_check_has_a_dry_run(tmp_path: Path) -> None:
    # The study takes minutes even here: --dry-run-on-cpu --only study.
    assert dry_run(tmp_path, *(name for name in CHECKS if name not in ("nccl", "study"))) == 0, "\n".join(
        path.read_text()[-2000:] for path in tmp_path.glob("*.log")
    )
    kernels = json.loads((tmp_path / "kernels.json").read_text())
    assert len(kernels) == 3 * (1 + 5) + 2, "in Triton's interpreter: low rank, five formats, and exact in 16 bits"


def test_a_check_that_fails_or_takes_too_long_is_said_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never: dict[str, Check] = {"messages": replace(CHECKS["messages"], limit=0)}
    monkeypatch.setattr(gpu_check, "CHECKS", never)
    assert dry_run(tmp_path, "messages") == 1
    assert "## messages: FAILED" in (tmp_path / "gpu_check.md").read_text()
    assert "not finished after 0 s" in (tmp_path / "gpu_check.md").read_text()


def test_a_sender_that_remembers_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = LowRankMessages.receive

    def deaf(messages: LowRankMessages, gradient: torch.Tensor) -> Transfer:
        return receive(messages, gradient).then(lambda: gradient.mul_(0.5))

    monkeypatch.setattr(LowRankMessages, "receive", deaf)
    with pytest.raises(SystemExit, match="message 0: the sender's residual is not what"):
        list(world_of_one.messages(torch.device("cpu")))
