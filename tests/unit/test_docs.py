"""The documents name what there is: every flag, every refusal, and files that exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.hooks.refusals import REFUSALS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "patches" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS = ["--" + f.name.replace("_", "-") for f in fields(OptimusConfig) if f.name != "force_compression"]


@pytest.mark.parametrize("name", ["README.md", "docs/flags.md"])
def test_every_flag_is_explained(name: str) -> None:
    text = (ROOT / name).read_text()
    left_to_the_table = {"--compression-seed"} if name != "README.md" else set()
    assert [flag for flag in FLAGS if flag not in text and flag not in left_to_the_table] == []


def test_every_refusal_has_its_cure_in_troubleshooting() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [refusal.flag for refusal in REFUSALS if f"`{refusal.flag}" not in text] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_that_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_modules_that_are_named_exist(document: Path) -> None:
    folders = "hooks|techniques|compressors|cpu_runtime|forecast|checkpoint|metrics"
    named = re.findall(rf"`((?:{folders})/\w+\.py)`", document.read_text())
    assert [name for name in named if not (ROOT / "optimus_cc_ext" / name).exists()] == []
