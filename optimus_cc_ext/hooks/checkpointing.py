"""Wraps megatron/training/checkpointing.py: what the techniques remember is saved and loaded with every checkpoint.

Saving: each rank writes its state beside the checkpoints before Megatron saves; between Megatron's files and its
tracker file all of it is moved there. With --async-save training waits for a copy to the host's memory only: a thread
writes that, and Megatron moves it when every rank's writer is done. Megatron's own files carry a mark of the save that
ours belong to. Loading: after Megatron's, all ranks agree about what they found before any of them uses it.
"""

import functools
import inspect
import re
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optimus_cc_ext.checkpoint import state_files
from optimus_cc_ext.checkpoint.resuming import Resumption, decide, settings_of
from optimus_cc_ext.checkpoint.state_files import DamagedState, Manifest, RankFile
from optimus_cc_ext.errors import OptimusError, exit_with
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session

__all__ = ["resume_beside", "save_beside", "wraps"]

_MODULE = "megatron.training.checkpointing"
_CALLERS = "megatron.training.training"
_SAVE = ("iteration", "non_persistent_ckpt", "release")
_LOAD = ("optimizer", "load_arg")
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
    # Megatron's training loop has names of its own for the two functions.
    return [
        (Seam(f"{_MODULE}:save_checkpoint", _SAVE), _around(saving.save)),
        (Seam(f"{_CALLERS}:save_checkpoint", _SAVE), _around(saving.save)),
        (Seam(f"{_MODULE}:get_checkpoint_tracker_filename", ("checkpoints_path",)), _around(saving.before_tracker)),
        (Seam(f"{_MODULE}:schedule_async_save", ("async_request",)), _around(saving.schedule)),
        (Seam(f"{_CALLERS}:maybe_finalize_async_save", ("blocking",)), _around(saving.finalize)),
        (Seam(f"{_MODULE}:load_checkpoint", _LOAD), _around(loading.load)),
        (Seam(f"{_CALLERS}:load_checkpoint", _LOAD), _around(loading.load)),
        (Seam(f"{_MODULE}:_load_base_checkpoint", ("load_dir",)), _around(loading.note)),
    ]


def _around(call: Callable[..., Any]) -> Callable[[Any], Any]:
    """Make every call of what is wrapped one of `call(original, *args, **kwargs)`."""

    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return wrapper

    return factory


@dataclass(frozen=True)
class _Files:
    """The files of one save."""

    staging: Path
    """The folder in which they wait to be moved into the checkpoint."""

    write: Callable[[], RankFile]
    """This rank's."""

    manifest: Manifest
    """Without them."""

    def describe(self, written: Callable[[], RankFile]) -> None:
        """Have every rank's be `written`, and write the last of them. Collective over all ranks.

        Raises:
            OptimusError: on all ranks, if one of them could not write; says which one, and why.
        """
        failed = "writing the state of compression failed: "
        manifest = replace(self.manifest, files=tuple(_on_all_ranks(written, failed)))
        first = dist.get_rank() == 0
        _on_all_ranks(lambda: state_files.write_manifest(self.staging, manifest) if first else None, failed)


@dataclass(frozen=True)
class _UnderWay:
    """A save whose files a thread writes."""

    files: _Files
    file: Future[RankFile]
    iteration_folder: Path


@dataclass
class _Saving:
    session: Session
    staged: tuple[str, Path | None, Path] | None = None
    """On the first rank, while Megatron saves: the folder of checkpoints, that of the files that wait to be moved into
    the checkpoint (None: there is nothing to remember), and the checkpoint's."""

    under_way: _UnderWay | None = None
    """With --async-save; on all ranks or none."""

    thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    def save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args
        from megatron.training.checkpointing import get_checkpoint_name

        # Megatron, too, warns of a save before the last one is done. Two copies of the state are one too many.
        self.finish()
        given, megatron_args = _arguments(original, args, kwargs), get_args()
        iteration = given["iteration"]
        folder = _save_folder(megatron_args, given["non_persistent_ckpt"])
        iteration_folder = Path(get_checkpoint_name(folder, iteration, given["release"], return_base_dir=True))
        vars(megatron_args).pop(_MARK, None)
        files, in_background = None, bool(megatron_args.async_save)
        if settings := settings_of(self.session.config, _words(megatron_args, _MESSAGES)):
            topology = _words(megatron_args, _TOPOLOGY)
            files = self.start(Path(folder), iteration, settings, topology, copied=in_background)
            setattr(megatron_args, _MARK, files.manifest.checkpoint)
            if not in_background:
                files.describe(files.write)
        if dist.get_rank() == 0 and not (files and in_background):
            self.staged = folder, files.staging if files else None, iteration_folder
        try:
            result = original(*args, **kwargs)
        finally:
            self.staged = None
        if files and in_background:  # now, because Megatron may just have forked
            self.under_way = _UnderWay(files, self.thread.submit(files.write), iteration_folder)
        return result

    def start(
        self, save_folder: Path, iteration: int, settings: dict[str, Any], topology: dict[str, Any], *, copied: bool
    ) -> _Files:
        """What is to be written beside the checkpoints. Collective over all ranks.

        Args:
            copied: the state is written later, as it is now.

        Raises:
            OptimusError: on all ranks, if there is no folder to write to, or no memory for a copy.
        """
        rank, staging, state = dist.get_rank(), state_files.staging_folder(save_folder), dict[str, Any]()

        def begin() -> str:
            if rank == 0:
                state_files.start_staging(save_folder)
            now = self.session.state_dict()
            state.update(state_files.copy_on_host(now) if copied else now)
            return uuid.uuid4().hex

        mark = _on_all_ranks(begin, "preparing to save the state of compression failed: ")[0]
        write = partial(state_files.write_rank_file, staging, rank, iteration, state)
        return _Files(
            staging, write, Manifest(iteration=iteration, checkpoint=mark, topology=topology, techniques=settings)
        )

    def schedule(self, original: Callable[..., Any], async_request: Any) -> Any:
        from megatron.training import get_args

        # All ranks call what is in there once their writers are done; the last of it writes the tracker file.
        async_request.finalize_fns.insert(0, partial(self.finish, getattr(get_args(), _MARK, None)))
        return original(async_request)

    def finalize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        blocking = _arguments(original, args, kwargs)["blocking"]
        if self.under_way and not blocking and not all(_on_all_ranks(self.under_way.file.done, "")):
            return None  # the loop asks again after each iteration
        return original(*args, **kwargs)

    def finish(self, mark: str | None = None) -> None:
        """Put what a thread writes into its checkpoint: of the save with this mark, or of any. Collective.

        Raises:
            OptimusError: on all ranks, if one of them could not write.
        """
        this = self.under_way
        if this is None or mark not in (None, this.files.manifest.checkpoint):
            return
        self.under_way = None
        this.files.describe(this.file.result)
        if dist.get_rank() == 0:
            state_files.publish(this.files.staging, this.iteration_folder)

    def before_tracker(self, original: Callable[..., Any], checkpoints_path: Any) -> Any:
        # The first rank asks for the tracker file's name when every rank's part of the checkpoint is written.
        if self.staged is not None and str(checkpoints_path) == self.staged[0]:
            state_files.publish(*self.staged[1:])
            self.staged = None
        return original(checkpoints_path)


def save_beside(session: Session, iteration_folder: Path, iteration: int, args: Any) -> None:
    """Put the state beside a checkpoint that another program than Megatron's loop has saved. Collective over all ranks.

    Raises:
        OptimusError: on all ranks, if one of them could not write.
    """
    if settings := settings_of(session.config, _words(args, _MESSAGES)):
        topology = _words(args, _TOPOLOGY)
        files = _Saving(session).start(iteration_folder.parent, iteration, settings, topology, copied=False)
        files.describe(files.write)
        if dist.get_rank() == 0:
            state_files.publish(files.staging, iteration_folder)


def resume_beside(session: Session, iteration_folder: Path, iteration: int, args: Any) -> None:
    """Restore what `save_beside` put there, and say what does not fit. Collective over all ranks.

    Raises:
        OptimusError: on all ranks: a file is missing or damaged, or ranks found different ones.
    """
    manifest = state_files.read_manifest(iteration_folder)
    mark = None if manifest is None else manifest.checkpoint
    _resume(session, _Found(iteration_folder, iteration, mark, release=False), args)


def _save_folder(args: Any, non_persistent: bool) -> str:
    """Where Megatron puts a checkpoint's iteration folder."""
    from megatron.training import checkpointing

    if not non_persistent:
        return str(args.save)
    return str(args.non_persistent_global_ckpt_dir or Path(args.save) / checkpointing._NON_PERSISTENT_CKPT_SUBDIR)


@dataclass(frozen=True)
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

    def load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        self.found.clear()
        result = original(*args, **kwargs)
        given = _arguments(original, args, kwargs)
        # Others are loaded too: a teacher to distil, a model to compare with.
        if self.found and given["load_arg"] == "load" and given["optimizer"] is not None:
            try:
                _resume(self.session, self.found[-1], get_args())
            except OptimusError as error:
                exit_with(error)
        return result

    def note(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        state_dict, name, release, _ = result
        folder = next((p for p in (Path(name), *Path(name).parents) if _ITERATION_FOLDER.fullmatch(p.name)), None)
        if state_dict is not None and folder is not None:
            mark = getattr(state_dict.get("args"), _MARK, None)
            self.found.append(_Found(folder, state_dict.get("iteration"), mark, release))
        return result


def _resume(session: Session, found: _Found, args: Any) -> None:
    """Restore what fits, and say what does not. Collective over all ranks.

    Raises:
        OptimusError: on all ranks, before any state is used: one rank's files are damaged, or ranks found different
            checkpoints.
    """
    folder = found.iteration_folder / state_files.FOLDER
    lines: list[str] = []
    if settings := settings_of(session.config, _words(args, _MESSAGES)):
        resumption, state = Resumption(reset={}), dict[str, Any]()

        def read() -> tuple[str | None, dict[str, str]]:
            nonlocal resumption, state
            unwanted = _unwanted(found, args)
            manifest = None if unwanted else state_files.read_manifest(found.iteration_folder)
            resumption = decide(settings, _words(args, _TOPOLOGY), manifest, checkpoint=found.mark, unwanted=unwanted)
            if manifest is None:
                return None, {}
            if resumption.restored:
                if found.mark != manifest.checkpoint or found.iteration not in (None, manifest.iteration):
                    raise DamagedState(
                        folder / state_files.MANIFEST,
                        f"it is of another save (iteration {manifest.iteration}) than the checkpoint "
                        f"(iteration {found.iteration})",
                    )
                state = state_files.read_rank_file(found.iteration_folder, manifest, dist.get_rank())
            return manifest.checkpoint, session.mismatches(_only(state, resumption))

        marks, mismatches = zip(*_on_all_ranks(read, ""), strict=True)
        if len(set(marks)) > 1:
            raise OptimusError(
                f"ranks find different files in {folder}. All of them have to see one folder of checkpoints"
            )
        for reasons in mismatches:
            resumption = resumption.without(reasons)
        if resumption.restored:
            session.load_state_dict(_only(state, resumption))
        lines = resumption.lines()
    elif folder.exists():
        lines = [f"nothing that remembers is switched on: {folder} is ignored"]
    if dist.get_rank() == 0:
        for line in lines:
            print(f"optimus-cc: {line}", flush=True)


def _only(state: Mapping[str, Any], resumption: Resumption) -> dict[str, Any]:
    """What of it does not start afresh."""
    return {name: part for name, part in state.items() if name not in resumption.reset}


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


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """By name: what a call gives to `function`, or leaves at its default."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def _on_all_ranks[T](work: Callable[[], T], failed: str) -> list[T]:
    """Everyone's result of `work`, which each rank does for itself.

    Args:
        failed: begins the message of the error.

    Raises:
        OptimusError: on all ranks, if one of them failed; says which one, and why.
    """
    answer: tuple[T | None, str | None]
    try:
        answer = work(), None
    except (OSError, RuntimeError) as error:  # the second is how torch.save says that the disk is full
        answer = None, str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, answer)
    for rank, (_, reason) in enumerate(everyone):
        if reason is not None:
            raise OptimusError(f"rank {rank}: {failed}{reason}")
    return [result for result, _ in everyone]
