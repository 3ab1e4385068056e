"""The supported versions of Megatron are the same ones everywhere where they are written down."""

import re
from pathlib import Path

from packaging.requirements import Requirement

from optimus_cc_ext.hooks.registry import SUPPORTED_MEGATRON

ROOT = Path(__file__).resolve().parents[2]
WITHDRAWN = "0.19.1"
"""What a checkout of the tag core_v0.19.0 calls itself; nobody installs it from PyPI."""
RELEASED = [version for version in SUPPORTED_MEGATRON if version != WITHDRAWN]
OTHER_RELEASES = ("0.16.1", "0.17.0", "0.18.0", "0.18.1")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_pyproject_admits_the_supported_releases_and_no_other() -> None:
    found = re.search(r'"(megatron-core.*)"', read("pyproject.toml"))
    assert found is not None
    admitted = Requirement(found[1]).specifier
    assert [version for version in (*RELEASED, *OTHER_RELEASES) if version in admitted] == RELEASED
    assert "0.19.3" not in admitted and "0.20.0" not in admitted


def test_the_reference_is_the_version_that_is_installed() -> None:
    assert f"\nmegatron-core=={SUPPORTED_MEGATRON[-1]}\n" in read("requirements.lock")


def test_ci_runs_the_smoke_test_of_every_other_release() -> None:
    assert re.findall(r"test\.sh --megatron (\S+)", read(".ci/run")) == RELEASED[:-1]


def test_help_and_the_table_of_versions_name_them_all() -> None:
    for version in RELEASED:
        assert version in read("scripts/test.sh")
    for version in SUPPORTED_MEGATRON:
        assert any(version in line for line in read("docs/compatibility.md").splitlines() if line.startswith("| "))
