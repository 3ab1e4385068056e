"""What holds for every test: no network, one thread per process unless the caller says otherwise, two tiers.

The default time limit of a test is in pytest.ini.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Set at import, before a test module imports torch or transformers, which read them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# No deadline for a single example: on a machine that is busy it measures the machine.
settings.register_profile("here", deadline=None)
settings.load_profile("here")

TESTS = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run what is marked `full`: see CONTRIBUTING.md")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # With several workers (pytest-xdist): one makes all Megatron runs, whose ranks use every core; a file else
        # stays together for what its tests share.
        folder, *rest = item.path.relative_to(TESTS).parts
        together = folder if folder in ("megatron", "distributed") else "/".join((folder, *rest))
        item.add_marker(pytest.mark.xdist_group(together))
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        # Deselected rather than skipped: nothing is missing here, these are simply not asked for.
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
