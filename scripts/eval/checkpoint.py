"""Reader of Megatron's checkpoint folders in one process: the formats `torch_dist` (its default) and `torch`."""

import argparse
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import torch
from torch.distributed import checkpoint as torch_dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from optimus_cc_ext.errors import FlagError
from scripts.eval.merge import Weights, join_stages, merge_tensor_ranks, unstack_layers, with_local_names

_TRACKER = "latest_checkpointed_iteration.txt"
_RANK_FILE = "model_optim_rng.pt"
_MODEL_PARTS = ("embedding.", "decoder.", "output_layer.")
_DAMAGED = (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError, BadZipFile)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Folder of one iteration's checkpoint, and the arguments that Megatron was called with."""

    folder: Path
    format: Literal["torch_dist", "torch"]
    args: argparse.Namespace


def find_checkpoint(path: Path, iteration: int | None = None) -> Checkpoint:
    """Find the checkpoint in `path`: a run's --save folder (its latest, or `iteration`) or an iteration's folder
    itself.

    Raises FlagError if there is no checkpoint, its format cannot be read, or files are damaged.
    """
    folder = _iteration_folder(path, iteration)
    if (folder / "metadata.json").is_file():
        return Checkpoint(folder, "torch_dist", _read_distributed_args(folder))
    ranks = sorted(folder.glob(f"mp_rank_00*/{_RANK_FILE}"))
    if ranks:
        return Checkpoint(folder, "torch", _args_in(_read_rank(ranks[0]), ranks[0]))
    if (folder / ".metadata").is_file():
        raise FlagError(
            "--checkpoint",
            f"{folder} was saved by an FSDP (--ckpt-format torch_dcp or fsdp_dtensor), which cannot be read here",
            "Load it with Megatron and save it with --ckpt-format torch_dist",
        )
    if any(folder.glob("mp_rank_*")):
        _check_complete(folder, [f"mp_rank_00*/{_RANK_FILE}"])
    raise _no_checkpoint(folder, "has neither metadata.json nor folders mp_rank_*")


def read_weights(checkpoint: Checkpoint) -> Weights:
    """Read the whole model's parameters, with the names of merge.py; optimizer states are not read.

    Raises FlagError for missing or damaged files, and if ranks disagree.
    """
    if checkpoint.format == "torch_dist":
        return unstack_layers(with_local_names(_read_distributed(checkpoint.folder)))
    return _read_ranks(checkpoint)


def _iteration_folder(path: Path, iteration: int | None) -> Path:
    if not path.is_dir():
        raise _no_checkpoint(path, "is not a folder")
    tracker = path / _TRACKER
    if iteration is None:
        if not tracker.is_file():
            return path
        latest = tracker.read_text().strip()
        name = latest if latest == "release" else f"iter_{int(latest):07d}" if latest.isdecimal() else None
        if name is None:
            raise _no_checkpoint(path, f"has a {_TRACKER} that says '{latest[:20]}', not a number")
    else:
        name = f"iter_{iteration:07d}"
    if not (path / name).is_dir():
        there = ", ".join(sorted(found.name for found in path.glob("iter_*") if found.is_dir())[-5:]) or "none"
        raise FlagError(
            "--checkpoint" if iteration is None else "--iteration",
            f"{path} has no {name} (there: {there})",
            "Give the number of an existing iteration: --iteration N",
        )
    return path / name


def _read_ranks(checkpoint: Checkpoint) -> Weights:
    args = checkpoint.args
    stages, tensor_ranks = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    names = [
        [f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "") for rank in range(tensor_ranks)]
        for stage in range(stages)
    ]
    _check_complete(checkpoint.folder, [f"{name}/{_RANK_FILE}" for row in names for name in row])
    states = [[_read_rank(checkpoint.folder / name / _RANK_FILE) for name in row] for row in names]
    # One model per rank, or with interleaved stages one per chunk.
    chunks = sorted((key for key in states[0][0] if re.fullmatch(r"model\d*", key)), key=lambda key: (len(key), key))
    try:
        merged = [
            merge_tensor_ranks([with_local_names(state[chunk]) for state in row]) for chunk in chunks for row in states
        ]
    except KeyError as error:
        raise _damaged(checkpoint.folder, f"a rank's file lacks {error}") from error
    return join_stages(merged, tied=not args.untie_embeddings_and_output_weights)


def _read_rank(file: Path) -> dict[str, Any]:
    # The file is mapped instead of read, because the optimizer's tensors are most of it.
    with _megatron_objects(), _damage_named(file):
        state: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"a {type(state).__name__}, not a dictionary")
        return state


def _read_distributed(folder: Path) -> dict[str, Any]:
    with _damage_named(folder):
        reader = torch_dist.FileSystemReader(folder)
        metadata = reader.read_metadata()
        _check_complete(folder, sorted({part.relative_path for part in metadata.storage_data.values()}))
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(_MODEL_PARTS)
        }
        with warnings.catch_warnings():
            # The warning says that there is only one process, which is intended.
            warnings.simplefilter("ignore")
            torch_dist.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _read_distributed_args(folder: Path) -> argparse.Namespace:
    # Megatron's own function knows where its versions keep the arguments: in a file of their own, or among the shards.
    with _megatron_objects(), _damage_named(folder):
        from megatron.core import dist_checkpointing

        return _args_in(dist_checkpointing.load_common_state_dict(str(folder)), folder)


def _args_in(state: dict[str, Any], where: Path) -> argparse.Namespace:
    args = state.get("args")
    if not isinstance(args, argparse.Namespace):
        raise _damaged(where, "Megatron's arguments are not in it")
    return args


@contextmanager
def _megatron_objects() -> Iterator[None]:
    """Let files hold the objects that Megatron itself allows, and nothing else, because unpickling can run any code."""
    with warnings.catch_warnings():
        # Megatron warns about kernels that are not installed, which reading files does not need.
        warnings.simplefilter("ignore")
        from megatron.core.safe_globals import SAFE_GLOBALS

        with torch.serialization.safe_globals(SAFE_GLOBALS):
            yield


@contextmanager
def _damage_named(where: Path) -> Iterator[None]:
    try:
        yield
    except FlagError:
        raise
    except (*_DAMAGED, torch_dist.CheckpointException) as error:
        raise _damaged(where, str(error).strip().split("\n")[0] or type(error).__name__) from error


def _no_checkpoint(path: Path, reason: str) -> FlagError:
    return FlagError(
        "--checkpoint",
        f"{path} {reason}, so it is no checkpoint of Megatron",
        "Give the folder that training was given as --save, or one of its iter_*",
    )


def _check_complete(folder: Path, names: list[str]) -> None:
    if missing := [name for name in names if not (folder / name).is_file()]:
        names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise FlagError(
            "--checkpoint",
            f"{folder} is incomplete: {names} missing",
            "Copy the files of all nodes into one folder, or take another iteration",
        )


def _damaged(where: Path, reason: str) -> FlagError:
    return FlagError(
        "--checkpoint", f"{where} cannot be read ({reason})", "Copy it again, or take another iteration: --iteration N"
    )
