"""Output folders and files that are either complete or absent: built under a temporary name beside the target, then
renamed.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optimus_cc_ext.tools.data.documents import DataError


def check_replaceable(target: Path, source: Path, ours: set[str]) -> None:
    """Refuse a `target` that contains the input, or names other than `ours`, because the folder will be replaced.

    Raises DataError.
    """
    if source.is_relative_to(target.resolve()):
        raise DataError(
            f"--output {target}: the folder contains the input, which would be deleted. Give another folder"
        )
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise DataError(f"--output {target}: the path exists and is not a folder. Give another path")
    if target.is_dir():
        others = sorted(path.name for path in target.iterdir() if path.name not in ours)
        if others:
            raise DataError(
                f"--output {target}: the folder contains '{others[0]}', which this command did not write and would "
                "delete."
                " Give a new or empty folder"
            )


@contextmanager
def locked(target: Path) -> Iterator[Path]:
    """Lock `target` against other processes, waiting if needed, and yield the temporary path to build it under.

    The path does not exist when it is yielded: leftovers of a killed run are removed. When the block ends, in any way,
    the temporary path and the lock file are removed.
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
        # Remove the lock file while the lock is held, so that a new lock file of another process is never removed.
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock file `path`; the kernel frees the lock when the process ends."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # the last holder removed the lock file while this process waited for it


def replace(partial: Path, target: Path) -> None:
    """Put the complete folder `partial` in the place of `target`."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to the file `path`, so that neither an interruption nor a full disk leaves half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
