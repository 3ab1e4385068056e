"""patches/: the files contain only insertions of ours, and apply.sh knows which files it may touch.

Nothing here is upstream's: apply.sh is tried on an invented tag. megatron/test_patched_checkouts.py has real checkouts.
"""

import hashlib
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launches import Launch, call

PATCHES = Path(__file__).resolve().parents[2] / "patches"
TABLE = [line.split() for line in (PATCHES / "pretrain_gpt.sha256").read_text().splitlines() if line[0] != "#"]
TAGS = [tag for tag, _, _ in TABLE]

ORIGINAL = "import time\n\nimport torch\n\nprint('training')\n"
INSERTED = "print('ours')\n\n"
PATCHED = ORIGINAL.replace("import torch", INSERTED + "import torch")


def inserted_lines(tag: str) -> list[str]:
    """Return the lines that the tag's patch inserts, after checking that it does nothing else."""
    names, (hunk, *body) = (lines := (PATCHES / tag / "pretrain_gpt.patch").read_text().splitlines())[:2], lines[2:]
    assert names == ["--- a/pretrain_gpt.py", "+++ b/pretrain_gpt.py"]
    after, first, count = map(int, re.fullmatch(r"@@ -(\d+),0 \+(\d+),(\d+) @@", hunk).groups())  # type: ignore[union-attr]
    assert first == after + 1 and count == len(body)
    assert all(line.startswith("+") for line in body), "insertions only: no context, nothing taken away"
    return [line[1:] for line in body]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_there_is_one_patch_per_known_tag() -> None:
    assert sorted(TAGS) == sorted(folder.name for folder in PATCHES.iterdir() if folder.is_dir())
    assert len({digest for row in TABLE for digest in row[1:]}) == 2 * len(TAGS)
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for row in TABLE for digest in row[1:])


@pytest.mark.parametrize("tag", TAGS)
def test_every_patch_inserts_the_same_lines_and_nothing_else(tag: str) -> None:
    lines = inserted_lines(tag)
    assert lines == inserted_lines(TAGS[0])
    assert lines[0].startswith("# Optimus-CC")
    compile("\n".join(lines), tag, "exec")


def run_inserted_lines(folder: str, run_name: str) -> bool:
    """Return whether Megatron's parser knows our flags after the lines have run; called in a forked rank."""
    import argparse

    from megatron.training import arguments

    runpy.run_path(f"{folder}/pretrain_gpt.py", run_name=run_name)
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return "--optimus-cc" in parser._option_string_actions


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain_gpt.py"
    path.write_text("\n".join(inserted_lines(TAGS[0])))
    return path


def test_as_a_script_the_lines_load_us_and_say_so(script: Path) -> None:
    found = call(run_inserted_lines, str(script.parent), "__main__")
    assert found.code is True, found.output
    assert [line.split(" from ")[0] for line in found.ours] == [
        "optimus-cc: running on CPU over gloo (OPTIMUS_CC_DEVICE=cpu)",
        "optimus-cc: Megatron",
    ]


def test_imported_by_another_script_they_do_nothing(script: Path) -> None:
    assert call(run_inserted_lines, str(script.parent), "pretrain_gpt") == Launch(False, "")


def test_without_our_package_they_say_what_to_install(script: Path) -> None:
    # Under -I -S Python searches neither the current folder nor site-packages.
    ended = subprocess.run([sys.executable, "-I", "-S", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and "optimus_cc_ext, which is not installed" in last
    assert "pip install" in last and "apply.sh --undo" in last


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """Put apply.sh beside the patch of one tag that does not exist."""
    patches = tmp_path / "patches"
    (patches / "made_up").mkdir(parents=True)
    shutil.copy(PATCHES / "apply.sh", patches)
    patch = "--- a/pretrain_gpt.py\n+++ b/pretrain_gpt.py\n@@ -2,0 +3,2 @@\n"
    patch += "".join(f"+{line}\n" for line in INSERTED.splitlines())
    (patches / "made_up" / "pretrain_gpt.patch").write_text(patch)
    (patches / "pretrain_gpt.sha256").write_text(f"# a comment\nmade_up {sha256(ORIGINAL)} {sha256(PATCHED)}\n")
    return patches / "apply.sh"


def run_apply(apply: Path, *arguments: str | Path) -> tuple[int, str]:
    ended = subprocess.run(
        ["bash", apply, *arguments], text=True, timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize("place", ["no repository", "a repository", "inside of another repository"])
def test_applied_twice_is_applied_once_and_undone_is_as_before(made_up: Path, tmp_path: Path, place: str) -> None:
    checkout = tmp_path / "their checkout"
    checkout.mkdir()
    if place != "no repository":
        inside = tmp_path if place.startswith("inside") else checkout
        subprocess.run(["git", "init", "--quiet"], cwd=inside, check=True)
    file = checkout / "pretrain_gpt.py"
    file.write_text(ORIGINAL)
    file.chmod(0o755)
    for action, state, text in (
        ("--check", "original", ORIGINAL),
        ("", "patched", PATCHED),
        ("", "patched", PATCHED),
        ("--check", "patched", PATCHED),
        ("--undo", "original", ORIGINAL),
        ("--undo", "original", ORIGINAL),
    ):
        assert run_apply(made_up, checkout, action) == (0, f"{file}: made_up, {state}\n")
        assert file.read_text() == text
    assert file.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in checkout.iterdir() if path.name != ".git"] == ["pretrain_gpt.py"], "nothing is left"


@pytest.mark.parametrize("action", ["", "--check", "--undo"])
def test_an_unknown_file_is_refused_by_name_and_left_alone(tmp_path: Path, action: str) -> None:
    file = tmp_path / "pretrain_gpt.py"
    file.write_text(ORIGINAL)
    code, said = run_apply(PATCHES / "apply.sh", tmp_path, action)
    assert code == 1
    assert f"{file} is of no known tag (sha256 {sha256(ORIGINAL)})" in said
    assert f"known: {' '.join(TAGS)}." in said
    assert f"-m optimus_cc_ext {file}" in said, "the way that needs no patch"
    assert file.read_text() == ORIGINAL


def test_a_patch_that_does_not_give_the_known_outcome_changes_nothing(made_up: Path, tmp_path: Path) -> None:
    table = made_up.parent / "pretrain_gpt.sha256"
    table.write_text(table.read_text().replace(sha256(PATCHED), sha256("something else")))
    (tmp_path / "pretrain_gpt.py").write_text(ORIGINAL)
    code, said = run_apply(made_up, tmp_path)
    assert code == 1 and "is of no known tag" in said
    assert (tmp_path / "pretrain_gpt.py").read_text() == ORIGINAL


@pytest.mark.parametrize("arguments", [(), ("--check",), (".", "--force"), (".", "--undo", "more")])
def test_a_wrong_call_shows_how_to_call_it(arguments: tuple[str, ...]) -> None:
    code, said = run_apply(PATCHES / "apply.sh", *arguments)
    assert code == 2 and "patches/apply.sh DIR --undo" in said


def test_a_folder_without_the_script_is_named(tmp_path: Path) -> None:
    code, said = run_apply(PATCHES / "apply.sh", tmp_path)
    assert code == 1 and f"{tmp_path}/pretrain_gpt.py does not exist" in said
