"""The extension in a copy of the package from which `tools/` is deleted."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.megatron.test_launcher import ROOT, TWO_STAGES, logged_losses, mark, torchrun

__all__ = ["mark"]  # a fixture

PYTHON = (sys.executable, "-S")
"""Python without the import hook of an editable install, which would find the deleted folder in the repository."""

PACKAGE = ROOT / "optimus_cc_ext"
SCRIPT = PACKAGE / "tools/pretrain_gpt.py"


@pytest.fixture
def without_tools(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package that has no tools, and with a script that trains a GPT."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("tools", "__pycache__"))
    shutil.copy(SCRIPT, tmp_path / "train.py")
    return tmp_path


def searched(folder: Path) -> str:
    return f"{folder}:{sysconfig.get_path('purelib')}"


def test_every_module_of_the_extension_can_be_imported(without_tools: Path) -> None:
    modules = [
        ".".join(path.relative_to(without_tools).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((without_tools / PACKAGE.name).rglob("*.py"))
        if path.name != "__main__.py"
    ]
    assert len(modules) > 80
    program = f"from importlib import import_module\nfor name in {modules}: print(import_module(name).__file__)"
    environment = {**os.environ, "PYTHONPATH": searched(without_tools)}
    command = [*PYTHON, "-c", program]
    done = subprocess.run(command, cwd=without_tools, env=environment, capture_output=True, text=True, timeout=120)
    assert all(line.startswith(str(without_tools)) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_a_script_trains_and_the_launcher_says_that_its_own_is_missing(without_tools: Path, mark: str) -> None:
    program, path = ("--no-python", *PYTHON, "-m", "optimus_cc_ext"), searched(without_tools)
    trained = torchrun(["train.py", *TWO_STAGES], without_tools, mark, program=program, python_path=path)
    assert trained.code == 0, trained.output[-3000:]
    assert len(logged_losses(trained.output)) == 2 and "optimus-cc traffic per iteration" in trained.output
    refused = torchrun(TWO_STAGES, without_tools, mark, program=program, python_path=path, ranks=1)
    assert refused.code != 0
    assert "error: the built-in pretrain_gpt is not installed. Give the script of a Megatron-LM" in refused.output
