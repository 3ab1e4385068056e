"""Settings of every test: no network, one thread per process unless the caller sets another number, three tiers.

The default time limit of a test is in pytest.ini.
"""

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# These variables are set at import, before a test module imports torch or transformers, which read them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests start hundreds of processes, and each would compile every file anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# All ranks of a test run on this machine; compression is for messages between nodes.
os.environ.setdefault("OPTIMUS_CC_NODE", "ranks:1")

# No deadline for a single example, and none for generating it: on a busy machine they measure the machine.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")

_SAID = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    if record := config.getoption("--record"):
        os.environ["OPTIMUS_CC_TEST_RECORD"] = os.path.abspath(record)
    if not os.environ.keys().isdisjoint(("OPTIMUS_CC_TEST_MEGATRON", "OPTIMUS_CC_TEST_TORCH")):
        # GPUs are counted through NVML, because CUDA itself does not survive a fork.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        import torch

        from tests import device

        gpus = torch.cuda.device_count()
        os.environ[device.VARIABLE] = device.device_of(os.environ, gpus)
        config.stash[_SAID] = device.said_of(device.device_of(os.environ, gpus), gpus)


@pytest.fixture(autouse=os.environ.get("TRITON_INTERPRET") == "1")
def sanitized() -> Iterator[list[str]]:
    """Reports on the kernels that a test runs in Triton's interpreter; the test fails if any is left."""
    from tests import sanitizer

    with sanitizer.sanitized() as reports:
        yield reports
    assert not reports, "\n".join(reports[:5])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB, which later mounts can change."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this test mounts a file system, which only root may: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return config.stash.get(_SAID, [])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run what is marked `full` or `ci`: see CONTRIBUTING.md")
    parser.addoption("--ci", action="store_true", help="also run what is marked `ci`")
    parser.addoption(
        "--record", metavar="FILE", help="record all Megatron runs in FILE: see tests/megatron/identity.py"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests that share Megatron runs, and all of tests/distributed, to one worker each if there are several;
    keep a file together otherwise.
    """
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def shares(file: str) -> bool:
        return "/distributed/" in file or ("/megatron/" in file and "@uses(" in (config.rootpath / file).read_text())

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file.rpartition("/")[0] if shares(file) else file

    return ByFolder(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    marks = ("full",) if config.getoption("--ci") else ("full", "ci")
    slow = [any(map(item.get_closest_marker, marks)) for item in items]
    left_out = list(itertools.compress(items, slow))
    if left_out:
        # Deselected rather than skipped, because nothing is missing here: these tests are simply not requested.
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, long in zip(items, slow, strict=True) if not long]
