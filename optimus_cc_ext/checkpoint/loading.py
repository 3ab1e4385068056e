"""The way back from a checkpoint: all ranks agree about what they found before any of them uses it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optimus_cc_ext.checkpoint import state_files
from optimus_cc_ext.checkpoint.resuming import Resumption, decide
from optimus_cc_ext.checkpoint.saving import Remembers, on_all_ranks
from optimus_cc_ext.checkpoint.state_files import DamagedState, Manifest
from optimus_cc_ext.errors import OptimusError

__all__ = ["FoundCheckpoint", "Resume"]


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint that a run goes on from."""

    iteration_folder: Path
    iteration: int | None
    mark: str | None
    """The mark of our save that the checkpoint's own files carry; None: they were saved without Optimus-CC."""

    @property
    def files(self) -> Path:
        """The folder of our files in it."""
        return self.iteration_folder / state_files.FOLDER


@dataclass(frozen=True)
class _Answer:
    """One rank's findings, for all ranks to compare."""

    mark: str | None
    mismatches: Mapping[str, str]


class Resume:
    """One return from a checkpoint, on one rank.

    Args:
        settings: by technique that remembers anything in this run, the settings that its state depends on.
        topology: this run's layout, in words.
        unwanted: the reason why the state is not to be restored in any case, if there is one.
    """

    def __init__(
        self,
        found: FoundCheckpoint,
        settings: Mapping[str, Mapping[str, Any]],
        topology: Mapping[str, Any],
        *,
        unwanted: str | None = None,
    ) -> None:
        self._found, self._settings, self._topology, self._unwanted = found, settings, topology, unwanted
        self._resumption = Resumption(reset={})
        self._state: dict[str, Any] = {}

    def restore(self, session: Remembers) -> list[str]:
        """Restore the state that fits, and return the lines that say what does not. Collective over all ranks.

        Raises:
            OptimusError: on all ranks, before any state is used: one rank's files are damaged, or ranks found
                different checkpoints.
        """
        if not self._settings:
            ignored = f"nothing that remembers is switched on: {self._found.files} is ignored"
            return [ignored] if self._found.files.exists() else []
        self._agree(on_all_ranks(lambda: self._read(session), ""))
        if self._resumption.restored:
            session.load_state_dict(self._restored_state())
        return self._resumption.lines()

    def _read(self, session: Remembers) -> _Answer:
        """Decide what to restore, and read it."""
        found = self._found
        manifest = None if self._unwanted else state_files.read_manifest(found.iteration_folder)
        self._resumption = decide(
            self._settings, self._topology, manifest, checkpoint=found.mark, unwanted=self._unwanted
        )
        if manifest is None:
            return _Answer(None, {})
        if self._resumption.restored:
            self._check_save(manifest)
            self._state = state_files.read_rank_file(found.iteration_folder, manifest, dist.get_rank())
        return _Answer(manifest.checkpoint, session.mismatches(self._restored_state()))

    def _check_save(self, manifest: Manifest) -> None:
        """Refuse files of another save than the checkpoint's."""
        found = self._found
        if found.mark != manifest.checkpoint or found.iteration not in (None, manifest.iteration):
            raise DamagedState(
                found.files / state_files.MANIFEST,
                f"it is of another save (iteration {manifest.iteration}) than the checkpoint "
                f"(iteration {found.iteration})",
            )

    def _agree(self, answers: Sequence[_Answer]) -> None:
        """Let a technique start afresh on all ranks where its state does not fit on one."""
        if len({answer.mark for answer in answers}) > 1:
            raise OptimusError(
                f"ranks find different files in {self._found.files}. All of them have to see one folder of checkpoints"
            )
        for answer in answers:
            self._resumption = self._resumption.without(answer.mismatches)

    def _restored_state(self) -> dict[str, Any]:
        """The state without the techniques that start afresh."""
        return {name: part for name, part in self._state.items() if name not in self._resumption.reset}
