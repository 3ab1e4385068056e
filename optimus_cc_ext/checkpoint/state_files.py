"""Files of a checkpoint's compression state, which are written completely or not at all, and checked when read.

    <iteration's folder>/optimus_cc/rank_00000.pt, rank_00001.pt, ...   each rank's state
    <iteration's folder>/optimus_cc/topology.json                       the run's layout, sizes and hashes of the files

The files are first written to a folder beside the checkpoints. `publish` moves that folder into the checkpoint in one
step, so that a run that is killed at any moment leaves either all files there or none. Write errors raise OSError with
file, reason and cure, unreadable files raise `DamagedState`.
"""

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from optimus_cc_ext.config.classes import class_named
from optimus_cc_ext.errors import OptimusError, UnknownName

FOLDER = "optimus_cc"
"""Name of our folder within the folder of a checkpoint's iteration."""

_STAGING = ".optimus_cc_incomplete"
_ABANDONED_SECONDS = 24 * 60 * 60
"""Age at which a staged folder of an unknown owner is abandoned: no save takes a day."""

MANIFEST = "topology.json"
_FORMAT = 3
"""Version of the file format; topology.json may hold the whole state. Formats 1 and 2 were never released."""


class DamagedState(OptimusError):
    """State files that differ from those that were saved; the message names the file, the reason and the cure."""

    def __init__(self, file: Path, reason: str) -> None:
        folder = next((parent for parent in file.parents if parent.name == FOLDER), file)
        super().__init__(
            f"{file}: {reason}. Load another checkpoint (--ckpt-step), or remove {folder}: training then goes on from "
            "this checkpoint with empty residuals and new factors."
        )


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """Size and hash of one rank's file as it was written."""

    size: int
    """Size of the file in bytes."""

    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of topology.json: a description of the rank files beside it."""

    iteration: int
    checkpoint: str
    """The mark of the save that wrote the rank files."""

    topology: dict[str, Any]
    """The run's layout by description; every rank's state depends on it."""

    techniques: dict[str, dict[str, Any]]
    """Settings on which the state of each technique depends."""

    files: tuple[RankFile, ...] = ()
    """The rank files, in the order of the ranks."""

    common: dict[str, Any] | None = None
    """The state of every rank, if 8b301ab saved one without tensors, the same on all ranks; later saves have None."""

    format: int = _FORMAT


def new_mark() -> str:
    """Return a mark for a save: a random word that begins with the process that saves, by which a later run finds out
    if that process still lives.
    """
    return f"{_processes()}-{os.getpid()}-{uuid.uuid4().hex}"


def staging_folder(save_folder: Path, mark: str) -> Path:
    """Return the folder, on the checkpoints' file system, that the save `mark` writes to first.

    Each save has a folder name of its own: a client of a network file system may still resolve the name of an earlier
    folder, which has been moved into a checkpoint, and would write the rank's file into that checkpoint.
    """
    return save_folder / f"{_STAGING}_{mark}"


def start_staging(save_folder: Path, mark: str) -> None:
    """Make `staging_folder`; leftovers of runs that have ended are removed."""
    _remove_leftovers(save_folder)
    staging = staging_folder(save_folder, mark)
    with _naming(staging, "made"):
        staging.mkdir(parents=True)


def check_room(save_folder: Path, nbytes: int) -> None:
    """Raise OSError if the file system of `save_folder` has less than `nbytes` free."""
    there = shutil.disk_usage(save_folder)
    sizes = f"a state of {nbytes / 1e6:.3f} MB, as {there.free / 1e6:.3f} MB are free"
    if there.total and there.free < nbytes:  # some network file systems have no sizes
        with _naming(save_folder, f"filled with {sizes}"):
            raise OSError(errno.ENOSPC, "")


def tensor_bytes(state: Any) -> int:
    """Return the bytes of all tensors in `state`."""
    if isinstance(state, dict):
        return sum(map(tensor_bytes, state.values()))
    if isinstance(state, list | tuple):
        return sum(map(tensor_bytes, state))
    return state.nbytes if isinstance(state, torch.Tensor) else 0


def copy_on_host(state: Any) -> Any:
    """Return a copy of `state` whose tensors are new ones on the CPU, so that further training does not change them."""
    if isinstance(state, dict):
        return {key: copy_on_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(copy_on_host, state))
    return state.to("cpu", copy=True) if isinstance(state, torch.Tensor) else state


def write_rank_file(staging: Path, rank: int, iteration: int, state: dict[str, Any]) -> RankFile:
    """Write one rank's state: tensors, numbers, strings, and lists and dicts of them."""
    path = staging / _rank_file(rank)
    with _naming(path, "written"), path.open("wb") as file:
        hashed = _Hashed(file)
        torch.save({"rank": rank, "iteration": iteration, "state": state}, cast(BinaryIO, hashed))
        _to_disk(file)
    return RankFile(size=hashed.size, sha256=hashed.sha256.hexdigest())


def write_manifest(staging: Path, manifest: Manifest) -> None:
    """Write topology.json, the last file of a save."""
    path = staging / MANIFEST
    with _naming(path, "written"), path.open("wb") as file:
        file.write(json.dumps({"ranks": len(manifest.files), **asdict(manifest)}, indent=1).encode())
        _to_disk(file)


def publish(staging: Path | None, iteration_folder: Path) -> None:
    """Move the staged files into the checkpoint `iteration_folder`, replacing older ones, which are deleted last.

    Args:
        staging: the staged folder; None: the checkpoint has no state, and files of an earlier save are removed.
    """
    folder = iteration_folder / FOLDER
    with _naming(folder, "put into the checkpoint"):
        if staging is None:
            _set_aside(folder)
        else:
            new = iteration_folder / staging.name
            _rename(staging, new)
            _names_to_disk(new)  # another run may set `folder` aside as soon as it is there
            _replace(folder, new)
            _names_to_disk(iteration_folder)
    _remove_leftovers(iteration_folder)


def read_manifest(iteration_folder: Path) -> Manifest | None:
    """Read topology.json; None for a checkpoint without our files.

    Raises:
        DamagedState: our folder exists, but topology.json is missing or not in our format.
    """
    path = iteration_folder / FOLDER / MANIFEST
    if not path.parent.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise DamagedState(path, f"format {content['format']}, and this version reads format {_FORMAT}")
        described = {field.name: content[field.name] for field in fields(Manifest)}
        manifest = Manifest(**described | {"files": tuple(RankFile(**file) for file in content["files"])})
        if len(manifest.files) != content["ranks"]:
            raise DamagedState(path, f"it lists {len(manifest.files)} files for {content['ranks']} ranks")
        for name, settings in manifest.techniques.items():
            class_named(name).check_format(settings)
    except FileNotFoundError as error:
        raise DamagedState(path, "the file is missing") from error
    except UnknownName as error:
        raise DamagedState(path, str(error)) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedState(path, f"the file cannot be read ({type(error).__name__}: {error})") from error
    return manifest


def read_rank_file(iteration_folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """Read one rank's state after checking it against `manifest`; its tensors are on the CPU.

    Raises:
        DamagedState: the file is missing, incomplete, or another one.
    """
    path, expected = iteration_folder / FOLDER / _rank_file(rank), manifest.files[rank]
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise DamagedState(path, f"it has {size} bytes, but {expected.size} were written")
        if _sha256(path) != expected.sha256:
            raise DamagedState(path, "its content has changed since it was written (another sha256)")
        content = torch.load(path, map_location="cpu", weights_only=True)
        found = content["rank"], content["iteration"]
        state: dict[str, Any] = content["state"]
    except FileNotFoundError as error:
        raise DamagedState(path, "the file is missing") from error
    except DamagedState:
        raise
    except Exception as error:  # unpickling damaged bytes can raise any exception
        raise DamagedState(path, f"the file cannot be read ({type(error).__name__}: {error})") from error
    if found != (rank, manifest.iteration):
        raise DamagedState(path, f"it is the state of rank {found[0]} at iteration {found[1]}")
    return state


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Hashed:
    """A file that is hashed while it is written: reading it again would double the traffic of a shared disk."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def write(self, content: Any) -> int:
        """Append `content`, bytes or a view of memory, to the file."""
        written = self._file.write(content)
        self.size += written
        self.sha256.update(content)
        return written

    def flush(self) -> None:
        """Hand all bytes written so far to the operating system."""
        self._file.flush()


_NOT_SHARED = "Give all ranks one shared folder of checkpoints, in which no other program deletes"
_NOT_ALLOWED = "Let the user of this job write there"
_FULL = "Make room"
_CURES = {
    errno.ENOENT: _NOT_SHARED,
    errno.ENOTDIR: _NOT_SHARED,
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: "Mount the file system for writing",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: f"{_FULL}, or let the quota be raised",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f)",
}

_NO_RENAME = (errno.EXDEV, errno.ENOSYS, errno.ENOTSUP, errno.EMFILE)
"""Errors with which a folder cannot be renamed to another file system, or at all on Mountpoint for S3 and gcsfuse
(EMFILE).
"""


@contextmanager
def _naming(path: Path, done: str) -> Iterator[None]:
    """Let what fails raise OSError with path, reason and cure. Neither Python nor torch.save names the file."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save raises a failed write as a RuntimeError, with the OSError as its cause or its context.
        causes = (error, error.__cause__, error.__context__)
        number = next((cause.errno for cause in causes if isinstance(cause, OSError) and cause.errno), None)
        reason = os.strerror(number) if number else error
        cure = _CURES.get(number or 0, "Mend the disk or its mount")
        raise OSError(
            f"{path} cannot be {done}: {reason}. {cure}, then resume: earlier checkpoints are whole"
        ) from error


def _processes() -> str:
    """Return a word for the processes that share this process's numbers: those of one container, or of one boot of a
    host.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]
    except OSError:
        return uuid.uuid4().hex


def _remove_leftovers(folder: Path) -> None:
    """Remove the staged folders to which no run can write any more. Another run may save into `folder`, too."""
    with suppress(OSError):  # a leftover that stays costs no more than its room
        for leftover in filter(_is_abandoned, folder.glob(f"{_STAGING}*")):
            if leftover.is_symlink():
                leftover.unlink()
            shutil.rmtree(leftover, ignore_errors=True)


def _is_abandoned(leftover: Path) -> bool:
    processes, pid, *_ = (leftover.name.removeprefix(f"{_STAGING}_") + "-").split("-")
    if processes == _processes() and (pid == str(os.getpid()) or not Path("/proc", pid).exists()):
        return True
    with suppress(OSError):  # its run may have just moved it into a checkpoint
        newest = max(path.lstat().st_mtime for path in (leftover, *leftover.glob("*")))
        return time.time() - newest > _ABANDONED_SECONDS
    return False


def _rename(folder: Path, name: Path) -> None:
    """Rename a folder of files. Where that is impossible, move the files one by one, topology.json last: the folder of
    an iteration may be a link to another file system, and mounted object stores cannot rename folders.
    """
    try:
        folder.rename(name)
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
        name.mkdir()
        for file in sorted(folder.iterdir()):
            with file.open("rb") as source, (name / file.name).open("wb") as target:
                shutil.copyfileobj(source, target)
                _to_disk(target)
        shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, new: Path) -> None:
    """Rename `new` to `folder`. An older `folder` is set aside, and put back if that fails."""
    old = None
    for tries_left in reversed(range(10)):  # another run may save the same iteration at the same time
        try:
            _rename(new, folder)
            return
        except OSError as error:
            if not tries_left or error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                if old is not None:
                    with suppress(OSError):
                        _rename(old, folder)
                raise
        old = _set_aside(folder)


def _set_aside(folder: Path) -> Path:
    """Rename `folder`, if it exists, to a leftover of this process."""
    aside = staging_folder(folder.parent, new_mark())
    with suppress(FileNotFoundError):
        _rename(folder, aside)
    return aside


def _to_disk(file: BinaryIO) -> None:
    """Wait until a file's content would survive a power failure."""
    file.flush()
    os.fsync(file.fileno())


def _names_to_disk(path: Path) -> None:
    """Wait until a folder's list of names would survive a power failure, where its file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
