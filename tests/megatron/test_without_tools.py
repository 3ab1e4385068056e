"""The extension in a copy of the package from which `tools/` is deleted, or all of it but `cpu/`."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.megatron.test_launcher import ROOT, TWO_STAGES, logged_losses, mark, torchrun

pytestmark = pytest.mark.ci

__all__ = ["mark"]  # a fixture

PYTHON = (sys.executable, "-S")
"""Python without the import hook of an editable install, which would find the deleted folder in the repository."""

PACKAGE = ROOT / "optimus_cc_ext"
SCRIPT = PACKAGE / "tools/pretrain_gpt.py"


def copied(folder: Path, *, kept: str | None = None) -> None:
    """Copy the package without tools, but for the folder of tools that is `kept`, and a script that trains a GPT."""
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("tools", "__pycache__"))
    if kept is not None:
        shutil.copytree(PACKAGE / "tools" / kept, folder / PACKAGE.name / "tools" / kept)
        shutil.copy(PACKAGE / "tools/__init__.py", folder / PACKAGE.name / "tools")
    shutil.copy(SCRIPT, folder / "train.py")


def searched(folder: Path) -> str:
    return f"{folder}:{sysconfig.get_path('purelib')}"


def test_every_module_of_the_extension_can_be_imported(tmp_path: Path) -> None:
    copied(tmp_path)
    modules = [
        ".".join(path.relative_to(tmp_path).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((tmp_path / PACKAGE.name).rglob("*.py"))
        if path.name != "__main__.py"
    ]
    assert len(modules) > 80
    program = f"from importlib import import_module\nfor name in {modules}: print(import_module(name).__file__)"
    environment = {**os.environ, "PYTHONPATH": searched(tmp_path)}
    command = [*PYTHON, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert all(line.startswith(str(tmp_path)) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_script_trains_and_the_launcher_says_that_its_own_is_missing(tmp_path: Path, mark: str) -> None:
    copied(tmp_path, kept="cpu")
    program, path = ("--no-python", *PYTHON, "-m", "optimus_cc_ext"), searched(tmp_path)
    trained = torchrun(["train.py", *TWO_STAGES], tmp_path, mark, program=program, python_path=path)
    assert trained.code == 0, trained.output[-3000:]
    assert len(logged_losses(trained.output)) == 2 and "optimus-cc traffic per iteration" in trained.output
    refused = torchrun(TWO_STAGES, tmp_path, mark, program=program, python_path=path, ranks=1)
    assert refused.code != 0
    assert "error: the built-in pretrain_gpt is not installed. Give the script of a Megatron-LM" in refused.output


def test_without_a_gpu_and_the_cpu_runtime_the_launcher_says_so(tmp_path: Path) -> None:
    copied(tmp_path)
    environment = {**os.environ, "PYTHONPATH": searched(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [*PYTHON, "-m", "optimus_cc_ext", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "PyTorch sees no CUDA device, and optimus_cc_ext.tools.cpu" in done.stderr
