"""Save of the compression state. All ranks take each step together; if a step fails on one rank, it fails on all.

save = Save(save_folder, iteration, settings, topology)
save.stage(session)                 # makes an empty folder, and takes the state as it is now
save.start_writing(thread)          # only if training continues during the write
save.finish_writing()               # writes every rank's file, then topology.json
save.publish(iteration_folder)      # moves all files into the checkpoint in one step
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from optimus_cc_ext.checkpoint import state_files
from optimus_cc_ext.checkpoint.state_files import Manifest, RankFile
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import PIPELINE_BACKWARD
from optimus_cc_ext.errors import OptimusError

_PREPARING_FAILED = "preparing to save the compression state failed: "
_UNFIT = "--save: low rank has a state to save on each rank, which int8 and int4 (--optimus-cc balanced) have not, and "
_WRITING_FAILED = "writing the compression state failed: "


class Remembers(Protocol):
    """The owner of the state that is saved: a session."""

    config: OptimusConfig
    trial: Any
    """The trial of the run; None: there is none."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs; its tensors are not copies."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""

    def mismatches(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Return the reasons why `load_state_dict` would refuse `state`, by technique."""
        ...


def on_all_ranks[T](work: Callable[[], T], failed: str) -> list[T]:
    """Do `work` on each rank, and return the results of all ranks. Collective over all ranks.

    Args:
        failed: the beginning of the error message.

    Raises:
        OptimusError: on all ranks, if one of them failed; names that rank and its reason.
    """
    answer: tuple[T | None, str | None]
    try:
        answer = work(), None
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        answer = None, str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, answer)
    for rank, (_, reason) in enumerate(everyone):
        if reason is not None:
            raise OptimusError(f"rank {rank}: {failed}{reason}")
    return [result for result, _ in everyone]


def rehearse(session: Remembers, save_folders: Iterable[Path]) -> None:
    """Prove that each rank can write its state where a save will: into a folder that the first rank has made, with
    room for the states of all ranks. Collective over all ranks; a state without tensors needs no proof.

    Raises:
        OptimusError: on all ranks, if one of them could not.
    """
    state = session.state_dict()
    sizes = on_all_ranks(lambda: state_files.tensor_bytes(state), "")
    # The state of links is made with their first messages.
    if not any(sizes) and not session.config.remembers(PIPELINE_BACKWARD):
        return
    for save_folder in save_folders:
        _write_nothing(save_folder, sum(sizes))


def _write_nothing(save_folder: Path, nbytes: int) -> None:
    """Write an empty state of each rank, and remove it; first check that there is room for `nbytes`."""
    rank = dist.get_rank()
    mark = state_files.new_mark()

    def start() -> str:
        if rank == 0:
            state_files.start_staging(save_folder, mark)
            state_files.check_room(save_folder, nbytes)
        return mark

    try:
        (mark, *_) = on_all_ranks(start, _UNFIT)
        staging = state_files.staging_folder(save_folder, mark)
        on_all_ranks(partial(state_files.write_rank_file, staging, rank, 0, {}), _UNFIT)
    finally:
        if rank == 0:
            shutil.rmtree(state_files.staging_folder(save_folder, mark), ignore_errors=True)


class Save:
    """The files of one save, on one rank.

    Args:
        save_folder: the folder of checkpoints; the files are written beside them first.
        settings: for each technique, the settings that its state depends on.
        topology: the run's layout, by description.
    """

    def __init__(
        self, save_folder: Path, iteration: int, settings: dict[str, dict[str, Any]], topology: dict[str, Any]
    ) -> None:
        self._save_folder = save_folder
        self._rank = dist.get_rank()
        self._state: dict[str, Any] = {}
        self._writing: Future[RankFile] | None = None
        self._manifest = Manifest(iteration=iteration, checkpoint="", topology=topology, techniques=settings)

    @property
    def staging(self) -> Path:
        """Folder that this save writes its files to, from `stage` until `publish` moves it into the checkpoint."""
        return state_files.staging_folder(self._save_folder, self.mark)

    @property
    def mark(self) -> str:
        """The mark of this save, a random word that Megatron's own files contain, too; empty before `stage`."""
        return self._manifest.checkpoint

    def stage(self, session: Remembers, *, copied: bool = False) -> None:
        """Make the staging folder, and take the state that is saved. Collective over all ranks.

        Args:
            copied: copy the state, because it is written later while training changes it.

        Raises:
            OptimusError: on all ranks, if the folder cannot be made, or memory is too small for a copy.
        """

        def take_state() -> str:
            mark = state_files.new_mark()
            if self._rank == 0:
                state_files.start_staging(self._save_folder, mark)
            now = session.state_dict()
            self._state = state_files.copy_on_host(now) if copied else now
            return mark

        (mark, *_) = on_all_ranks(take_state, _PREPARING_FAILED)
        self._manifest = replace(self._manifest, checkpoint=mark)

    def start_writing(self, thread: Executor) -> None:
        """Let `thread` write this rank's file while training continues; `stage` has to have copied the state."""
        self._writing = thread.submit(self._write)

    def is_written(self) -> bool:
        """Return True if the writing threads of all ranks are done. Collective over all ranks."""
        assert self._writing is not None, "no thread was given"
        return all(on_all_ranks(self._writing.done, ""))

    def finish_writing(self) -> None:
        """Write this rank's file, or wait for the thread that writes it; then write topology.json. Collective over all
        ranks.

        Raises:
            OptimusError: on all ranks, if one of them could not write; names that rank and its reason.
        """
        written = self._write if self._writing is None else self._writing.result
        self._manifest = replace(self._manifest, files=tuple(on_all_ranks(written, _WRITING_FAILED)))
        on_all_ranks(self._describe, _WRITING_FAILED)

    def publish(self, iteration_folder: Path) -> None:
        """Call `put_in_place` on the first rank, and wait for it on all others. Collective over all ranks.

        Raises:
            OptimusError: on all ranks, if the first rank could not.
        """
        on_all_ranks(partial(self.put_in_place, iteration_folder), "")

    def put_in_place(self, iteration_folder: Path) -> None:
        """Move the staged files into the checkpoint `iteration_folder`, on the first rank."""
        if self._rank == 0:
            state_files.publish(self.staging, iteration_folder)

    def _write(self) -> RankFile:
        return state_files.write_rank_file(self.staging, self._rank, self._manifest.iteration, self._state)

    def _describe(self) -> None:
        if self._rank == 0:
            state_files.write_manifest(self.staging, self._manifest)
