"""The folder of compiled kernels: on the node, of this user alone; one process compiles first; damage is survived."""

import os
import threading
from pathlib import Path

import pytest

from optimus_cc_ext.compressors import fast
from optimus_cc_ext.compressors.triton import cache, launches


def test_the_folder_is_of_this_user_alone_on_the_node_and_the_same_at_each_start(tmp_path: Path) -> None:
    for _ in range(2):
        environment = {"NODE_CACHE": str(tmp_path)}
        folder = cache.choose(environment)
        assert environment[cache.VARIABLE] == str(folder) == f"{tmp_path}/optimus-cc-{os.getuid()}/triton"
        assert folder.is_dir() and folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_users_own_folder_is_kept_and_made(tmp_path: Path) -> None:
    environment = {"NODE_CACHE": "/nowhere", cache.VARIABLE: str(tmp_path / "mine/kernels")}
    assert cache.choose(environment) == tmp_path / "mine/kernels"
    assert (tmp_path / "mine/kernels").is_dir() and environment[cache.VARIABLE] == str(tmp_path / "mine/kernels")


def test_a_folder_that_cannot_be_written_or_that_others_can_write_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open" / f"optimus-cc-{os.getuid()}").mkdir(parents=True)
    (tmp_path / "open" / f"optimus-cc-{os.getuid()}").chmod(0o777)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / f"optimus-cc-{os.getuid()}").symlink_to(tmp_path)
    for variable, place, said in (
        ("NODE_CACHE", "file", "cannot be written (Not a directory)"),
        ("NODE_CACHE", "missing", "cannot be written (No such file or directory)"),
        (cache.VARIABLE, "file/kernels", "cannot be written (Not a directory)"),
        ("NODE_CACHE", "open", "others can write to"),
        ("NODE_CACHE", "linked", "others can write to"),
    ):
        with pytest.raises(OSError, match="") as refused:
            cache.choose({variable: str(tmp_path / place)})
        message = str(refused.value)
        assert message.startswith(f"{variable}: ") and said in message and str(tmp_path / place) in message
        assert message.endswith(f"Set {variable} to a folder on the node in which you may write")
        assert cache.twice(lambda: None, {variable: str(tmp_path / place)}) == message


def test_one_process_compiles_first_and_the_others_then_go_on_together(tmp_path: Path) -> None:
    compiled, together = threading.Event(), threading.Barrier(2)

    def other() -> None:
        with cache.one_rank_first(tmp_path):
            assert compiled.is_set()
            together.wait(timeout=20)  # this wait ends in time only if both threads hold the lock together

    others = [threading.Thread(target=other) for _ in range(2)]
    with cache.one_rank_first(tmp_path):
        for each in others:
            each.start()
        others[0].join(timeout=0.2)
        compiled.set()
    for each in others:
        each.join(timeout=20)
        assert not each.is_alive()
    assert not together.broken


def test_a_trial_that_fails_is_repeated_once_in_a_fresh_folder(tmp_path: Path) -> None:
    environment, seen = {"NODE_CACHE": str(tmp_path)}, []

    def damaged() -> str | None:
        seen.append(Path(environment[cache.VARIABLE]))
        return "EOFError: damaged" if len(seen) == 1 else None

    assert cache.twice(damaged, environment) is None
    usual, fresh = seen
    assert fresh.parent == usual and list(fresh.iterdir()) == [] and environment[cache.VARIABLE] == str(fresh)
    reasons = iter(["first", "second", "third"])
    assert cache.twice(lambda: next(reasons), {"NODE_CACHE": str(tmp_path)}) == "second"


def test_a_triton_that_is_missing_or_too_old_is_the_reason_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = fast.Needed(ranks=(), formats=("int4",), dtypes=())
    monkeypatch.setattr(fast, "_has_gpu", lambda: False)
    assert fast.kernels(needed) == ("torch", None), "without a GPU it could not be otherwise"
    monkeypatch.setattr(fast, "_has_gpu", lambda: True)
    monkeypatch.setattr(launches, "AVAILABLE", False)
    monkeypatch.setattr(launches, "version", lambda name: "3.5.1")
    cure = "the kernels need Triton 3.6 or newer. Install torch 2.10 or newer, which brings it"
    assert fast.kernels(needed) == ("torch", f"Triton 3.5.1 is too old: {cure}")

    def missing(name: str) -> str:
        raise launches.PackageNotFoundError(name)

    monkeypatch.setattr(launches, "version", missing)
    assert fast.kernels(needed) == ("torch", f"Triton is not installed: {cure}")
