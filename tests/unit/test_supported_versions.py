"""The supported versions of Megatron and torch are the same in all places that name them."""

import re
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from optimus_cc_ext import OptimusConfig, compress, errors
from optimus_cc_ext.hooks.registry import SUPPORTED_MEGATRON
from optimus_cc_ext.tools import cli
from tests.launches import call, launch

ROOT = Path(__file__).resolve().parents[2]
WITHDRAWN = "0.19.1"
"""Version that a checkout of the tag core_v0.19.0 reports; nobody installs it from PyPI."""
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


OLDEST_TORCH = ".".join(map(str, errors.OLDEST_TORCH))
NGC_25_08 = "2.8.0a0+34c6371d24.nv25.08"
"""Older torch as a container brings it, where no requirement of pip's is read."""


def test_the_oldest_torch_is_one_whose_products_in_fp32_can_be_asked_for() -> None:
    # compressors/numerics.py reads this attribute before every product, and torch 2.8 does not have it.
    assert errors.OLDEST_TORCH == (2, 9) and torch.backends.cuda.matmul.fp32_precision


def test_pyproject_and_the_documents_admit_no_older_torch() -> None:
    found = re.search(r'"(torch[^"]*)"', read("pyproject.toml"))
    assert found is not None
    admitted = Requirement(found[1]).specifier
    assert [version for version in ("2.6.0", "2.8.0", "2.9.0", "2.14.1") if version in admitted] == ["2.9.0", "2.14.1"]
    compatibility = read("docs/compatibility.md")
    assert f"torch {OLDEST_TORCH} or newer" in compatibility
    tried = re.findall(r"^\| (\d+\.\d+\.\d+), Triton", compatibility, re.MULTILINE)
    assert tried[0].startswith(f"{OLDEST_TORCH}."), "the oldest release is among those that were tried"
    assert f"\ntorch=={tried[1]}\n" in read("requirements.lock") and len(tried) == 3


@pytest.mark.parametrize("version", ["2.9.0", "2.9.0a0+50eac811a6.nv25.09", "2.13.0+cpu", "2.14.1+cu130", "3.0.0"])
def test_a_torch_that_is_new_enough_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    errors.require_torch()


def an_older_torch() -> None:
    torch.__version__ = NGC_25_08


def doctor_on_an_older_torch() -> int:
    an_older_torch()
    return cli.main(["doctor"])


def custom_loop_on_an_older_torch() -> int:
    an_older_torch()
    try:
        compress([], None, OptimusConfig(compressed_backprop_format="low-rank"))
    except errors.OptimusError as error:
        print(error)
        return 2
    return 0


def test_an_older_torch_is_one_sentence_with_the_cure_wherever_training_starts() -> None:
    said = f"torch {NGC_25_08} is too old: Optimus-CC needs torch {OLDEST_TORCH} or newer"
    ended = launch([], before=an_older_torch)
    assert ended.code == 2 and ended.ours[-1].startswith("optimus-cc: error: rank 0 on ") and said in ended.ours[-1]
    found = call(doctor_on_an_older_torch)
    first = found.output.splitlines()[0]
    assert found.code == 1 and first.startswith("FAIL this machine") and said in first
    refused = call(custom_loop_on_an_older_torch)
    assert refused.code == 2 and refused.output.startswith(said)
    for output in (ended.ours[-1], first, refused.output):
        assert "Install torch>=2.9, or use a container that has it" in output
