"""The wheel in an environment of its own beside a real checkout, installed as the README says: `pip install --no-deps`.

    MEGATRON_LM_CHECKOUTS=/path/to/core_v0.19.0 scripts/test.sh --full tests/megatron/test_wheel.py

That environment has this one's packages, but neither its megatron-core nor this repository.
"""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.megatron.test_launcher import logged_losses
from tests.megatron.test_patched_checkouts import CHECKOUTS, NONE_GIVEN, checkout
from tests.shell_scripts import ROOT
from tests.slurm.real_slurm import ON_CPUS

__all__ = ["checkout"]  # a fixture

OURS_OR_MEGATRON = ("megatron", "optimus", "__editable__", "pip")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("environment")
    for path in ROOT.iterdir():  # The source folder has links, so that nothing is built into the repository.
        if path.name not in ("build", ".git", ".venv") and not path.name.endswith(".egg-info"):
            (source / path.name).symlink_to(path)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    venv.create(folder / "venv", with_pip=True)
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(OURS_OR_MEGATRON) and not (site_packages / path.name).exists():
            (site_packages / path.name).symlink_to(path)
    [wheel] = folder.glob("*.whl")
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    return folder / "venv/bin"


@pytest.mark.full
@pytest.mark.parametrize("checkout", CHECKOUTS or [pytest.param(None, marks=NONE_GIVEN)], indirect=True, ids=str)
def test_a_wheel_beside_a_checkout_examines_trains_and_finds_its_scripts_and_patches(
    checkout: Path, environment: Path, tmp_path: Path
) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"PATH": f"{environment}:{os.environ['PATH']}", "OPTIMUS_CC_DEVICE": "cpu"}

    def run(*command: str | Path, **more: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env={**variables, **more}, text=True, timeout=200,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    examined = run("optimus-cc", "doctor", PYTHONPATH=str(checkout))
    print(examined)
    assert "is supported" in examined and "FAIL" not in examined

    shared = Path(run("optimus-cc", "files").strip())
    assert shared.is_relative_to(environment.parent)
    assert ": not patched" in run(shared / "patches/apply.sh", checkout, "--check")
    trained = run(
        shared / "scripts/pretrain_gpt.sh", "--optimus-cc", *ON_CPUS,
        MODEL="tiny", TRAIN_ITERS="3", PIPELINE_PARALLEL="2", PROCESSES_PER_NODE="4", CHECKPOINT_DIR="none",
        MEGATRON_LM=str(checkout),
    )  # fmt: skip
    print(*trained.splitlines()[-12:], sep="\n")
    assert f"optimus-cc: Megatron from {checkout / 'megatron'}" in trained
    assert len(logged_losses(trained)) == 3
    assert len(re.findall(r"traffic per iteration \| .*DP gradients", trained)) == 3
