"""`optimus-cc patch` on files: what it writes, recognises, takes out again, and refuses; nothing is half-written."""

import ast
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_cc_ext.tools.cli import main
from optimus_cc_ext.tools.patch import block as blocks
from optimus_cc_ext.tools.patch.block import BLOCK, find, insert, remove
from optimus_cc_ext.tools.patch.command import _state

SOURCE = b'"""Doc."""\nimport sys\n\n# What trains.\nfrom megatron.training import pretrain\n\nprint(sys.argv)\n'
BLOCK_LINES = BLOCK.count("\n")
Patch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(SOURCE)
    return path


@pytest.fixture
def patch(script: Path, capsys: pytest.CaptureFixture[str]) -> Patch:
    """Return a function that runs the command on the script, and returns its status, stdout and stderr."""

    def run(*flags: str) -> tuple[int, str, str]:
        status = main(["patch", str(script), *flags])
        assert [path.name for path in script.parent.iterdir() if path.name.startswith(".")] == [], "nothing is left"
        return status, *capsys.readouterr()

    return run


def test_patched_twice_is_patched_once_and_undone_is_as_before(patch: Patch, script: Path) -> None:
    script.chmod(0o754)
    where = "ahead of the import megatron.training.pretrain\n"
    assert patch() == (0, f"{script}: patched at line 5 {where}", "")
    assert script.read_bytes() == SOURCE.replace(b"from megatron", BLOCK.encode() + b"from megatron")
    assert patch() == (0, f"{script}: already patched at line 5\n", "")
    assert script.stat().st_mode & 0o777 == 0o754
    assert patch("--undo") == (0, f"{script}: undone, the block stood at line 5\n", "")
    assert patch("--undo") == (0, f"{script}: not patched\n", "")
    assert script.read_bytes() == SOURCE and script.stat().st_mode & 0o777 == 0o754


SOURCES = {
    "CRLF": SOURCE.replace(b"\n", b"\r\n"),
    "CR": SOURCE.replace(b"\n", b"\r"),
    "BOM": b"\xef\xbb\xbf" + SOURCE,
    "BOM and the first line": b"\xef\xbb\xbfimport megatron.core\r\n",
    "Latin-1": b"#!/usr/bin/env python\n# coding: latin-1\n" + SOURCE.replace(b"Doc", b"\xe4\xf6"),
    "UTF-8": SOURCE.replace(b"Doc", "\u00e4\u2028\u0085\x0c".encode()),
    "no last line ending": b"import megatron.core",
    "comments only above": b"# One.\n\n\n# Two.\nimport megatron.core\n",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_encoding_and_line_endings_stay(patch: Patch, script: Path, source: bytes) -> None:
    script.write_bytes(source)
    assert patch()[0] == 0
    patched = script.read_bytes()
    endings = set(re.findall(rb"\r\n|\r|\n", source)) or {b"\n"}
    assert set(re.findall(rb"\r\n|\r|\n", patched)) == endings
    statements = ast.parse(patched).body
    assert len(statements) == len(ast.parse(source).body) + 1
    assert patched.startswith(b"\xef\xbb\xbf") == source.startswith(b"\xef\xbb\xbf")
    assert patch("--undo")[0] == 0 and script.read_bytes() == source


def test_a_link_stays_a_link_and_its_target_is_patched(patch: Patch, script: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "real.py"
    target.parent.mkdir()
    script.rename(target)
    script.symlink_to("elsewhere/real.py")
    assert patch()[0] == 0
    assert os.readlink(script) == "elsewhere/real.py" and find(target.read_bytes()) is not None
    assert patch("--undo")[0] == 0 and target.read_bytes() == SOURCE


def refused(patch: Patch, script: Path, *flags: str) -> str:
    """Return the one message of a refused call, after checking that the file stayed."""
    before = script.read_bytes() if script.is_file() else b""
    status, said, error = patch(*flags)
    assert (status, said) == (2, "") and error.startswith("error: ") and str(script) in error
    assert not script.is_file() or script.read_bytes() == before
    return error


BROKEN = {
    "this is no Python\n": r"cannot be read as Python 3\.\d+ \(line 1: invalid syntax\)",
    "import megatron.core\n\x00": r"null bytes",
    "import os\nfrom __future__ import division\n": r"line 2: from __future__ imports must occur",
    "# coding: klingon\n": r"unknown encoding",
    "x = 1\n": r"no main guard.*-m optimus_cc_ext",
    "import sys; sys.path.append('x'); import megatron.core\n": r"Put them on lines of their own",
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.items())
@pytest.mark.parametrize("flag", ["--force", "--check"])
def test_what_cannot_be_patched_is_refused_in_a_sentence(
    patch: Patch, script: Path, source: str, reason: str, flag: str
) -> None:
    script.write_text(source)
    assert re.search(reason, refused(patch, script, flag))


def test_a_folder_and_a_missing_file_are_named(patch: Patch, script: Path) -> None:
    script.unlink()
    assert "is no file. Give the path of an entry script" in refused(patch, script)
    script.mkdir()
    assert "is no file. Give the path of an entry script" in refused(patch, script)


def test_a_read_only_file_is_left_alone(patch: Patch, script: Path) -> None:
    script.chmod(0o444)
    assert f"is read-only. Let it be written, if that is meant: chmod u+w {script}" in refused(patch, script)


def test_of_several_scripts_all_are_patched_or_none(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.py"
    other.write_text("not Python")
    assert main(["patch", str(script), str(other)]) == 2
    assert script.read_bytes() == SOURCE and str(other) in capsys.readouterr().err


def test_if_one_cannot_be_written_beside_itself_none_is_and_it_is_named(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / f"{'x' * 250}.py"  # No name of this folder can be longer than 255 characters.
    other.write_bytes(SOURCE)
    assert main(["patch", str(script), str(other)]) == 2
    assert f"error: {other} cannot be replaced (File name too long)" in (said := capsys.readouterr()).err
    assert said.out == "" and sorted(tmp_path.iterdir()) == [script, other]
    assert script.read_bytes() == other.read_bytes() == SOURCE


# -- files that changed after they were patched -------------------------------------------------------------------


def test_the_block_is_taken_out_whatever_else_was_edited(patch: Patch, script: Path) -> None:
    patch()
    edited = b"# A note.\r\n" + script.read_bytes().replace(b"print(", b"this is not even Python (")
    script.write_bytes(edited)
    assert patch("--undo")[0] == 0
    assert script.read_bytes() == b"# A note.\r\n" + SOURCE.replace(b"print(", b"this is not even Python (")


def test_an_import_moved_ahead_of_the_block_is_named(patch: Patch, script: Path) -> None:
    patch()
    script.write_bytes(b"import megatron.core\n" + script.read_bytes())
    for flags in ((), ("--check",)):
        error = refused(patch, script, *flags)
        assert "line 1 imports megatron.core ahead of the block, which begins at line 6" in error
        assert "--undo, then again" in error
    assert patch("--undo")[0] == 0 and patch()[0] == 0
    assert (script.read_bytes().decode().splitlines())[0].startswith("# >>> optimus-cc")


@pytest.mark.parametrize("flags", [(), ("--undo",)])
def test_an_edited_block_is_shown_and_left_unless_forced(patch: Patch, script: Path, flags: tuple[str, ...]) -> None:
    patch()
    script.write_bytes(script.read_bytes().replace(b"    optimus_cc_startup", b"    print(1)\n    optimus_cc_startup"))
    error = refused(patch, script, *flags)
    assert f"the lines of the block, 5 to {5 + BLOCK_LINES}, were edited" in error and "\n+    print(1)\n" in error
    assert patch(*flags, "--force")[0] == 0
    assert script.read_bytes() == (SOURCE if flags else insert(SOURCE, 5))


def test_a_block_that_was_moved_by_hand_stays_there(patch: Patch, script: Path) -> None:
    moved = insert(SOURCE, 2)
    script.write_bytes(moved)
    assert patch() == (0, f"{script}: already patched at line 2\n", "") and script.read_bytes() == moved


def with_block_of_release(number: int) -> bytes:
    body = ["if __name__ == '__main__':", "    pass"]
    begin = f"# >>> optimus-cc block {number}, sha256 {blocks._sha256(body)}"
    return SOURCE.replace(b"# What", "\n".join([begin, *body, "# <<< optimus-cc", "# What"]).encode())


def test_the_block_of_an_older_release_is_renewed_where_it_stands(patch: Patch, script: Path) -> None:
    script.write_bytes(with_block_of_release(0))
    assert patch()[1].endswith(": patched at line 4\n") and script.read_bytes() == insert(SOURCE, 4)


def test_the_block_of_a_newer_release_is_left_unless_forced(patch: Patch, script: Path) -> None:
    newer = with_block_of_release(12)
    script.write_bytes(newer)
    error = refused(patch, script)
    assert "a newer release of Optimus-CC inserted the block at line 4" in error and "--force" in error
    assert next(_state(script)) == f"{script}: patched at line 4 by a newer release"
    assert patch("--undo")[0] == 0 and script.read_bytes() == SOURCE
    script.write_bytes(newer)
    assert patch("--force")[0] == 0 and script.read_bytes() == insert(SOURCE, 4)


def test_the_block_without_markers_is_known_by_its_text(patch: Patch, script: Path) -> None:
    old = "\n".join([*blocks._WITHOUT_MARKERS, ""])
    # The text that patches/apply.sh of commit 8b301ab inserted.
    assert hashlib.sha256(old.encode()).hexdigest().startswith("54a93847aca5ba76bff4698a69ec9f67")
    for ending in ("\n", "\r\n"):
        before = SOURCE.replace(b"\n", ending.encode())
        script.write_bytes(before.replace(b"# What", old.replace("\n", ending).encode() + b"# What"))
        patched = script.read_bytes()
        assert patch("--undo")[0] == 0 and script.read_bytes() == before
        script.write_bytes(patched)
        assert patch()[0] == 0 and script.read_bytes() == insert(before, 4)
    script.write_bytes(SOURCE + old.encode() + old.encode())
    assert re.search(r"lines 8, 21 are marker lines or blocks", refused(patch, script))


BEGIN, *_, END = BLOCK.splitlines(keepends=True)
DAMAGED = {
    BLOCK + BLOCK: f"1, {BLOCK_LINES}, {BLOCK_LINES + 1}, {2 * BLOCK_LINES}",
    BLOCK.replace(END, ""): "1",
    "\n" + BLOCK.replace(BEGIN, ""): f"{BLOCK_LINES}",
    END + BEGIN: "1, 2",
    BLOCK + "\n".join([*blocks._WITHOUT_MARKERS, ""]): f"1, {BLOCK_LINES}, {BLOCK_LINES + 1}",
}


@pytest.mark.parametrize(("text", "lines"), DAMAGED.items())
@pytest.mark.parametrize("flag", ["--force", "--undo", "--check"])
def test_several_or_damaged_blocks_are_refused_with_their_lines(
    patch: Patch, script: Path, text: str, lines: str, flag: str
) -> None:
    script.write_bytes(text.encode() + SOURCE)
    assert f"lines {lines} are marker lines or blocks of Optimus-CC" in refused(patch, script, flag)


LINES = st.lists(st.binary(max_size=20), max_size=6).map(b"\n".join)
ENDINGS = st.sampled_from([b"\n", b"\r\n"])


@pytest.mark.parametrize("examples", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_undone_after_any_edit_around_the_block_the_edit_is_left(examples: int) -> None:
    @settings(max_examples=examples)
    @given(above=LINES, below=LINES, ending=ENDINGS, cut=st.tuples(st.integers(0, 7), st.integers(0, 7)))
    def holds(above: bytes, below: bytes, ending: bytes, cut: tuple[int, int]) -> None:
        patched = insert(SOURCE.replace(b"\n", ending), 5)
        block = find(patched)
        assert block is not None
        lines = patched.splitlines(keepends=True)
        # Lines around the block are deleted, and others written in their place.
        head = b"".join(lines[: min(cut[0], 4)]) + (above + ending if above else b"")
        tail = below + ending + b"".join(lines[block.last + cut[1] :])
        edited = head + b"".join(lines[block.first - 1 : block.last]) + tail
        found = find(edited)
        assert found is not None and not found.edited
        assert remove(edited, found) == head + tail

    holds()
