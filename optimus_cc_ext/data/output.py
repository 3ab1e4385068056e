"""Folders and files that are complete or absent: built under another name beside theirs, renamed at the end."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optimus_cc_ext.data.documents import DataError

__all__ = ["check_replaceable", "locked", "replace", "write_whole"]


def check_replaceable(target: Path, source: Path, ours: set[str]) -> None:
    """Refuse a `target` that holds the input, or names other than `ours`: the folder is going to be replaced.

    Raises DataError.
    """
    if source.is_relative_to(target.resolve()):
        raise DataError(f"--output {target}: the input lies in it and would be deleted. Give another folder")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise DataError(f"--output {target}: exists and is not a folder. Give another one")
    if target.is_dir():
        others = sorted(path.name for path in target.iterdir() if path.name not in ours)
        if others:
            raise DataError(
                f"--output {target}: holds '{others[0]}', which was not made here and would be deleted."
                " Give a new or empty folder"
            )


@contextmanager
def locked(target: Path) -> Iterator[Path]:
    """Hold the only right to make `target`; yield the name to build it under. Waits for another holder.

    The name does not exist when it is yielded: what a killed run left there is removed. Whatever ends the
    block, neither it nor the lock file remains.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    lock = target.with_name(f".{target.name}.lock")
    descriptor = _lock(lock)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        # Removed while it is held, so that nobody's new lock file is removed.
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock file `path`; the kernel frees it when the process ends."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # its last holder removed it while this one waited


def replace(partial: Path, target: Path) -> None:
    """Put the complete folder `partial` in `target`'s place."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to the file `path`: neither an interruption nor a full disk leaves half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
