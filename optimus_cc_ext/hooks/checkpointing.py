"""Wraps megatron/training/checkpointing.py: what the techniques remember is saved and loaded with every checkpoint.

Saving: each rank writes its state beside the checkpoints before Megatron saves; between Megatron's files and its
tracker file, which makes the iteration count, all of it is moved into the checkpoint. With --async-save that is
earlier than the tracker: it is written when the background writer is done. Megatron's own files carry a mark of the
save that ours belong to.

Loading: after Megatron's, all ranks agree about what they found before any of them uses it.
"""

import functools
import inspect
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optimus_cc_ext.checkpoint.resuming import Resumption, decide, settings_of
from optimus_cc_ext.checkpoint.state_files import (
    FOLDER,
    DamagedState,
    Manifest,
    publish,
    read_manifest,
    read_rank_file,
    staging_folder,
    start_staging,
    write_manifest,
    write_rank_file,
)
from optimus_cc_ext.errors import OptimusError, exit_with
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session

__all__ = ["wraps"]

_MODULE = "megatron.training.checkpointing"
_CALLERS = "megatron.training.training"
_MARK = "optimus_cc_checkpoint"
"""Attribute of Megatron's arguments, which are part of its checkpoints."""

_TOPOLOGY = {
    "the number of ranks": "world_size",
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "the number of model chunks per stage": "virtual_pipeline_model_parallel_size",
    "--pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
    "the data-parallel size": "data_parallel_size",
    "--context-parallel-size": "context_parallel_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--use-tp-pp-dp-mapping": "use_tp_pp_dp_mapping",
}
_MESSAGES = {
    "--micro-batch-size": "micro_batch_size",
    "--seq-length": "seq_length",
    "--sequence-parallel": "sequence_parallel",
    "the parameters' dtype": "params_dtype",
}
_ITERATION_FOLDER = re.compile(r"iter_\d{7,}|release")


def wraps(session: Session) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seams of this file, with what wraps them."""
    saving, loading = _Saving(session), _Loading(session)
    save_parameters = ("iteration", "non_persistent_ckpt", "release")
    load_parameters = ("optimizer", "load_arg")
    # Megatron's training loop has names of its own for the two functions.
    return [
        *((Seam(f"{module}:save_checkpoint", save_parameters), saving.save) for module in (_MODULE, _CALLERS)),
        (Seam(f"{_MODULE}:get_checkpoint_tracker_filename", ("checkpoints_path",)), saving.before_tracker),
        *((Seam(f"{module}:load_checkpoint", load_parameters), loading.load) for module in (_MODULE, _CALLERS)),
        (Seam(f"{_MODULE}:_load_base_checkpoint", ("load_dir",)), loading.noting),
    ]


@dataclass(frozen=True)
class _Staged:
    """Files that wait for Megatron's to be written."""

    save_folder: str
    staging: Path | None
    """None: there is nothing to remember."""

    iteration_folder: Path


@dataclass
class _Saving:
    session: Session
    staged: _Staged | None = None
    """On the first rank, while Megatron saves."""

    def save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args
            from megatron.training.checkpointing import get_checkpoint_name

            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            iteration, release = call.arguments["iteration"], call.arguments["release"]
            megatron_args = get_args()
            save_folder = _save_folder(megatron_args, call.arguments["non_persistent_ckpt"])
            iteration_folder = get_checkpoint_name(save_folder, iteration, release, return_base_dir=True)
            staging, mark = self._stage(Path(save_folder), iteration, megatron_args)
            vars(megatron_args).pop(_MARK, None)
            if mark is not None:
                setattr(megatron_args, _MARK, mark)
            if dist.get_rank() == 0:
                self.staged = _Staged(str(save_folder), staging, Path(iteration_folder))
            try:
                return original(*args, **kwargs)
            finally:
                self.staged = None

        return save_checkpoint

    def before_tracker(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The first rank asks for the tracker file's name when every rank's part of the checkpoint is written, or
        handed to the background writer."""

        @functools.wraps(original)
        def get_checkpoint_tracker_filename(checkpoints_path: Any) -> Any:
            staged = self.staged
            if staged is not None and str(checkpoints_path) == staged.save_folder:
                publish(staged.staging, staged.iteration_folder)
                self.staged = None
            return original(checkpoints_path)

        return get_checkpoint_tracker_filename

    def _stage(self, save_folder: Path, iteration: int, args: Any) -> tuple[Path | None, str | None]:
        """Write every rank's state beside the checkpoints. Collective over all ranks.

        Raises:
            OptimusError: on all ranks, if one of them could not write; says which one, and why.
        """
        settings = settings_of(self.session.config, _words(args, _MESSAGES))
        if not settings:
            return None, None
        rank, staging = dist.get_rank(), staging_folder(save_folder)

        if rank == 0:
            _, failure = _tried(lambda: start_staging(save_folder))
        else:
            failure = None
        _agree(failure, "making a folder for the state of compression")
        written, failure = _tried(lambda: write_rank_file(staging, rank, iteration, self.session.state_dict()))
        files = _agree(failure, "writing the state of compression", written)
        mark = uuid.uuid4().hex
        if rank == 0:
            manifest = Manifest(
                iteration=iteration,
                checkpoint=mark,
                topology=_words(args, _TOPOLOGY),
                techniques=settings,
                files=tuple(files),
            )
            _, failure = _tried(lambda: write_manifest(staging, manifest))
        return staging, _agree(failure, "writing the state of compression", mark)[0]


def _save_folder(args: Any, non_persistent: bool) -> str:
    """Where Megatron puts a checkpoint's iteration folder."""
    from megatron.training import checkpointing

    if not non_persistent:
        return str(args.save)
    apart = args.non_persistent_global_ckpt_dir
    return str(apart or Path(args.save) / checkpointing._NON_PERSISTENT_CKPT_SUBDIR)


@dataclass
class _Found:
    """The checkpoint that Megatron loaded."""

    iteration_folder: Path
    iteration: int | None
    mark: str | None
    release: bool


@dataclass
class _Loading:
    session: Session
    found: list[_Found] = field(default_factory=list)
    """By the current load; the last one counts, the ones before only looked."""

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            self.found.clear()
            result = original(*args, **kwargs)
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            # Others are loaded too: a teacher to distil, a model to compare with.
            if self.found and call.arguments["load_arg"] == "load" and call.arguments["optimizer"] is not None:
                try:
                    _resume(self.session, self.found[-1], get_args())
                except OptimusError as error:
                    exit_with(error)
            return result

        return load_checkpoint

    def noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            state_dict, name, release, _ = result
            folder = next((p for p in (Path(name), *Path(name).parents) if _ITERATION_FOLDER.fullmatch(p.name)), None)
            if state_dict is not None and folder is not None:
                mark = getattr(state_dict.get("args"), _MARK, None)
                self.found.append(_Found(folder, state_dict.get("iteration"), mark, release))
            return result

        return _load_base_checkpoint


def _resume(session: Session, found: _Found, args: Any) -> None:
    """Restore what fits, and say what does not. Collective over all ranks.

    Raises:
        DamagedState: on all ranks, before any state is used.
        OptimusError: ranks found different checkpoints.
    """
    settings = settings_of(session.config, _words(args, _MESSAGES))
    folder = found.iteration_folder / FOLDER
    if not settings:
        if dist.get_rank() == 0 and folder.exists():
            print(f"optimus-cc: nothing that remembers is switched on: {folder} is ignored", flush=True)
        return
    unwanted = _unwanted(found, args)
    mark, resumption, state, failure = None, Resumption(reset={}), {}, None
    try:
        manifest = None if unwanted else read_manifest(found.iteration_folder)
        mark = manifest.checkpoint if manifest else None
        resumption = decide(settings, _words(args, _TOPOLOGY), manifest, checkpoint=found.mark, unwanted=unwanted)
        if manifest is not None and resumption.restored:
            _check_same_save(found, manifest)
            everything = read_rank_file(found.iteration_folder, manifest, dist.get_rank())
            state = {name: part for name, part in everything.items() if name not in resumption.reset}
    except DamagedState as damage:
        failure = str(damage)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (failure, mark, session.mismatches(state)))
    for rank, (reason, _, _) in enumerate(everyone):
        if reason is not None:
            raise OptimusError(f"rank {rank}: {reason}")
    if len({other for _, other, _ in everyone}) > 1:
        raise OptimusError(f"ranks find different files in {folder}. All of them have to see one folder of checkpoints")
    for _, _, mismatches in everyone:
        resumption = resumption.without(mismatches)
    if resumption.restored:
        session.load_state_dict({name: state[name] for name in state if name not in resumption.reset})
    if dist.get_rank() == 0:
        for line in resumption.lines():
            print(f"optimus-cc: {line}", flush=True)


def _check_same_save(found: _Found, manifest: Manifest) -> None:
    """The files have to be of the very save that Megatron's are of."""
    if found.mark == manifest.checkpoint and found.iteration in (None, manifest.iteration):
        return
    reason = f"it is of another save (iteration {manifest.iteration}) than the checkpoint (iteration {found.iteration})"
    raise DamagedState(found.iteration_folder / FOLDER / "topology.json", reason)


def _unwanted(found: _Found, args: Any) -> str | None:
    """Why the state is not to be restored, whatever it is."""
    if args.finetune:
        return "--finetune"
    if args.no_load_optim:
        return "--no-load-optim"
    return "a release checkpoint has none of a run's state" if found.release else None


def _words(args: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """What Megatron's arguments say about these, as JSON would give it back."""
    values = {words: getattr(args, name, None) for words, name in names.items()}
    return {words: value if isinstance(value, int | None) else str(value) for words, value in values.items()}


def _tried(write: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result, or what went wrong."""
    try:
        return write(), None
    except (OSError, RuntimeError) as error:  # the second is how torch.save says that the disk is full
        return None, str(error)


def _agree(failure: str | None, purpose: str, value: Any = None) -> list[Any]:
    """Everyone's `value`.

    Raises:
        OptimusError: on all ranks, if one of them failed.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (failure, value))
    for rank, (reason, _) in enumerate(everyone):
        if reason is not None:
            raise OptimusError(f"rank {rank}: {purpose} failed: {reason}")
    return [value for _, value in everyone]
