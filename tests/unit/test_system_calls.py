"""A watched process is held at each call that touches the folder, and the answer decides what the call does."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system_calls import AVAILABLE, KILL, Call, Watch

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs x86-64 and a kernel that lets a held call go on (5.5)")

WATCHED = """
import os, shutil, subprocess, sys
from tests.system_calls import watched_by
watched_by(sys.argv[1], reads=len(sys.argv) > 3)
os.chdir(sys.argv[2])
"""


def watched(
    folder: Path, code: str, answers: dict[str, int], *, reads: bool = False
) -> tuple[list[Call], subprocess.CompletedProcess[str]]:
    """Run `code` in a folder, and answer each of its system calls by the key "name path" of `answers`."""
    calls: list[Call] = []

    def answer(call: Call) -> int | None:
        calls.append(call)
        return answers.get(f"{call.name} {call.path}")

    with Watch(folder, answer) as watch:
        argv = [sys.executable, "-c", WATCHED + code, watch.address, str(folder), *["reads"] * reads]
        ended = subprocess.run(argv, env=os.environ | {"RANK": "3"}, capture_output=True, text=True, timeout=30)
    return calls, ended


@pytest.mark.parametrize("reads", [False, True])
def test_calls_of_python_of_its_child_and_below_an_open_folder_are_seen_in_order(tmp_path: Path, reads: bool) -> None:
    code = "os.mkdir('a'); open('a/x', 'w').write('text'); os.rename('a/x', 'a/y'); shutil.rmtree('a')\n"
    code += "subprocess.run(['touch', 'child']); open('/dev/null', 'w').write('elsewhere')"
    calls, ended = watched(tmp_path, code, {}, reads=reads)
    assert ended.returncode == 0, ended.stderr
    changes = [(call.process, call.name, call.path) for call in calls if call.changes]
    mine = ["mkdir a", "openat a/x", "write a/x", "close a/x", "rename a/x", "unlinkat a/y", "rmdir a"]
    mine = [name for name in mine if reads or name != "close a/x"]
    assert changes[: len(mine)] == [(0, *name.split()) for name in mine] and (1, "openat", "child") in changes
    assert {call.rank for call in calls} == {3}
    assert ("getdents64 a" in {f"{call.name} {call.path}" for call in calls}) == reads
    assert all(call.changes for call in calls) or reads


def test_a_call_that_is_answered_with_an_error_fails_with_it_and_is_not_made(tmp_path: Path) -> None:
    code = "try: os.mkdir('a')\nexcept OSError as error: print(error.errno, os.path.exists('a'))"
    _, ended = watched(tmp_path, code, {"mkdir a": errno.ESTALE})
    assert ended.stdout == f"{errno.ESTALE} False\n", ended.stderr


def test_a_process_that_is_killed_at_a_call_never_makes_it(tmp_path: Path) -> None:
    calls, ended = watched(tmp_path, "os.mkdir('a'); os.mkdir('b')", {"mkdir b": KILL})
    assert ended.returncode == -9 and [path.name for path in tmp_path.iterdir()] == ["a"]
    assert calls[-1].path == "b"


def test_an_answer_that_raises_fails_the_watch(tmp_path: Path) -> None:
    def answer(call: Call) -> None:
        raise RuntimeError("the answer's own")

    with pytest.raises(RuntimeError, match="the answer's own"), Watch(tmp_path, answer) as watch:
        argv = [sys.executable, "-c", f"{WATCHED}os.mkdir('a')", watch.address, str(tmp_path)]
        subprocess.run(argv, env=os.environ | {"RANK": "0"}, check=True, timeout=30)
