"""Files of a checkpoint's compression state, which are written completely or not at all, and checked when read.

    <iteration's folder>/optimus_cc/rank_00000.pt, rank_00001.pt, ...   each rank's state
    <iteration's folder>/optimus_cc/topology.json                       the run's layout, sizes and hashes of the files

A state without tensors that is the same on all ranks lies in topology.json, and no rank has a file.

The files are first written to a folder beside the checkpoints. `publish` moves that folder into the checkpoint in one
step, so that a run that is killed at any moment leaves either all files there or none. Write errors raise OSError,
unreadable files raise `DamagedState`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from optimus_cc_ext.config.classes import class_named
from optimus_cc_ext.errors import OptimusError, UnknownName

__all__ = [
    "FOLDER",
    "MANIFEST",
    "DamagedState",
    "Manifest",
    "RankFile",
    "copy_on_host",
    "has_tensors",
    "publish",
    "read_manifest",
    "read_rank_file",
    "staging_folder",
    "start_staging",
    "write_manifest",
    "write_rank_file",
]

FOLDER = "optimus_cc"
"""Name of our folder within the folder of a checkpoint's iteration."""

_STAGING = ".optimus_cc_incomplete"
MANIFEST = "topology.json"
_FORMAT = 3
"""Version of the file format that is written; all versions can be read. Format 3 may hold the state in topology.json,
format 2 has named states, format 1 numbered ones.
"""


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
    """The rank files, in the order of the ranks; none if `common` is the state."""

    common: dict[str, Any] | None = None
    """The state of every rank, if it is the same on all of them and has no tensors."""

    format: int = _FORMAT


def staging_folder(save_folder: Path, mark: str) -> Path:
    """Return the folder, on the checkpoints' file system, that the save `mark` writes to first.

    Each save has a folder name of its own: a client of a network file system may still resolve the name of an earlier
    folder, which has been moved into a checkpoint, and would write the rank's file into that checkpoint.
    """
    return save_folder / f"{_STAGING}_{mark}"


def start_staging(save_folder: Path, mark: str) -> None:
    """Make `staging_folder`; leftovers of a killed run are removed."""
    for leftover in save_folder.glob(f"{_STAGING}*"):
        shutil.rmtree(leftover)
    staging_folder(save_folder, mark).mkdir(parents=True)


def has_tensors(state: Any) -> bool:
    """Return True if there is a tensor in `state`, which JSON could not hold."""
    if isinstance(state, dict):
        return any(map(has_tensors, state.values()))
    return any(map(has_tensors, state)) if isinstance(state, list | tuple) else isinstance(state, torch.Tensor)


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
    with _naming(path), path.open("wb") as file:
        hashed = _Hashed(file)
        torch.save({"rank": rank, "iteration": iteration, "state": state}, cast(BinaryIO, hashed))
        _to_disk(file)
    return RankFile(size=hashed.size, sha256=hashed.sha256.hexdigest())


def write_manifest(staging: Path, manifest: Manifest) -> None:
    """Write topology.json, the last file of a save."""
    path = staging / MANIFEST
    with _naming(path), path.open("wb") as file:
        file.write(json.dumps({"ranks": len(manifest.files), **asdict(manifest)}, indent=1).encode())
        _to_disk(file)


def publish(staging: Path | None, iteration_folder: Path) -> None:
    """Move the staged files into the checkpoint `iteration_folder`, replacing older ones.

    Args:
        staging: the staged folder; None: the checkpoint has no state, and files of an earlier save are removed.
    """
    folder = iteration_folder / FOLDER
    if folder.exists():
        shutil.rmtree(folder)
    if staging is not None:
        staging.rename(folder)
        _names_to_disk(folder)
        _names_to_disk(iteration_folder)


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
        if content["format"] not in range(1, _FORMAT + 1):
            raise DamagedState(path, f"format {content['format']}, and this version reads formats 1 to {_FORMAT}")
        described = {"common": None} | content  # manifests of formats 1 and 2 have no common state
        described = {field.name: described[field.name] for field in fields(Manifest)}
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
    if manifest.common is not None:
        return manifest.common
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
    return state if manifest.format > 1 else _from_format_1(state)


def _from_format_1(state: dict[str, Any]) -> dict[str, Any]:
    """Convert a state of format 1, in which links, buckets and the shape groups of a bucket were lists, to named
    states.
    """

    def kept(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: entry[key] for key in ("residual", "warm_start")}

    named = dict(state)
    if links := state.get("compressed_backprop"):
        states = {
            f"chunk {link['chunk']}: {_shape(link['shape'])} {link['dtype'].removeprefix('torch.')}": kept(link)
            for link in links["states"]
        }
        named["compressed_backprop"] = {"states": states}
    if gradients := state.get("dp_compression"):
        states = {
            f"bucket {number}: {_shape(group['residual'].shape[1:])}": kept(group)
            for number, bucket in enumerate(gradients["buckets"])
            for group in bucket["groups"]
        }
        named["dp_compression"] = {**gradients, "states": states}
    return named


def _shape(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


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


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let a failed write raise OSError with file, reason and cure. Neither Python nor torch.save names the file."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save raises a failed write as a RuntimeError, with the OSError as its cause or its context.
        causes = (error, error.__cause__, error.__context__)
        reason = next(
            (os.strerror(cause.errno) for cause in causes if isinstance(cause, OSError) and cause.errno), None
        )
        raise OSError(
            f"{path} cannot be written: {reason or error}. Make room or mend the disk, then resume: all earlier "
            "checkpoints are whole"
        ) from error


def _to_disk(file: BinaryIO) -> None:
    """Wait until a file's content would survive a power failure."""
    file.flush()
    os.fsync(file.fileno())


def _names_to_disk(path: Path) -> None:
    """Wait until a folder's list of names would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
