"""Restoring state from a checkpoint: all ranks agree on the files that they found before any rank uses them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optimus_cc_ext.checkpoint import state_files
from optimus_cc_ext.checkpoint.resuming import Resumption, decide
from optimus_cc_ext.checkpoint.saving import Remembers, on_all_ranks
from optimus_cc_ext.errors import OptimusError


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint from which a run resumes."""

    iteration_folder: Path
    iteration: int | None
    mark: str | None
    """The mark of our save in the checkpoint's own files; None: the checkpoint was saved without Optimus-CC."""

    @property
    def files(self) -> Path:
        """The folder of our files in the checkpoint."""
        return self.iteration_folder / state_files.FOLDER


@dataclass(frozen=True)
class _Answer:
    """Findings of one rank about the checkpoint's files, which all ranks compare."""

    mark: str | None
    misfits: Mapping[str, str]
    """Techniques whose state does not fit this rank, each with the reason."""


class Resume:
    """One attempt to restore state from a checkpoint, on one rank.

    Args:
        settings: for each technique that keeps state in this run, the settings that the state depends on.
        topology: this run's layout, by description.
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
        """Restore the state that fits, and return a line for each reason why something was not restored. Collective
        over all ranks.

        Raises:
            OptimusError: on all ranks, before any state is used: one rank's files are damaged, or ranks found
                different checkpoints.
        """
        if not self._settings:
            ignored = f"no technique that keeps state is on, so {self._found.files} is ignored"
            return [ignored] if self._found.files.exists() else []
        self._agree(on_all_ranks(lambda: self._read(session), ""))
        if self._resumption.restored:
            session.load_state_dict(self._restored_state())
        return self._resumption.lines()

    def _read(self, session: Remembers) -> _Answer:
        """Decide which techniques' state to restore, and read it from this rank's file."""
        found = self._found
        manifest = None if self._unwanted else state_files.read_manifest(found.iteration_folder)
        self._resumption = decide(
            self._settings, self._topology, manifest,
            checkpoint=found.mark, iteration=found.iteration, unwanted=self._unwanted,
        )  # fmt: skip
        if manifest is None:
            return _Answer(None, self._resumption.reset)
        if self._resumption.restored:
            self._state = state_files.read_rank_file(found.iteration_folder, manifest, dist.get_rank())
        return _Answer(manifest.checkpoint, self._resumption.reset | session.mismatches(self._restored_state()))

    def _agree(self, answers: Sequence[_Answer]) -> None:
        """Reset a technique on all ranks if its state does not fit on one of them."""
        if len({answer.mark for answer in answers}) > 1:
            raise OptimusError(
                f"ranks find different files in {self._found.files}. Give all ranks the same checkpoint folder (--load)"
            )
        for answer in answers:
            self._resumption = self._resumption.without(answer.misfits)

    def _restored_state(self) -> dict[str, Any]:
        """Return the state of the techniques that are restored."""
        return {name: part for name, part in self._state.items() if name not in self._resumption.reset}
