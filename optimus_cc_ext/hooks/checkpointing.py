"""Wraps megatron/training/checkpointing.py: saves and loads the compression state with every checkpoint.

Saving: each rank writes its state beside the checkpoints before Megatron saves; between Megatron's files and its
tracker file, the state files are moved into the checkpoint. With --async-save, training waits only for a copy to the
host's memory: a thread writes the files, and Megatron moves them when every rank's writer is done. Megatron's own files
carry a mark of the save to which our files belong. Loading: after Megatron's load, all ranks agree about the state that
they found before any of them uses it.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optimus_cc_ext.announce import say
from optimus_cc_ext.checkpoint import state_files
from optimus_cc_ext.checkpoint.beside import resume, stage
from optimus_cc_ext.checkpoint.loading import FoundCheckpoint
from optimus_cc_ext.checkpoint.saving import Save, rehearse
from optimus_cc_ext.errors import OptimusError, ends_the_run
from optimus_cc_ext.hooks.registry import Seam, arguments_of
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques.session import Session

_MODULE = "megatron.training.checkpointing"
_CALLERS = "megatron.training.training"
_SAVE = ("iteration", "non_persistent_ckpt")
_LOAD = ("optimizer", "load_arg")
_MARK = "optimus_cc_checkpoint"
"""Attribute of Megatron's arguments, which are part of its checkpoints, that holds the mark of a save."""

_LEVELS = "optimus_cc_levels"
"""Attribute of Megatron's arguments that holds the levels in which the saving run added gradients up."""

_SAID = "optimus_cc/said by the first rank"
"""Key in torch's store of the sentence with which the first rank ends in a save."""

_TRIAL = "optimus_cc_trial"
"""Attribute of Megatron's arguments that holds the choice of the saving run's trial; None: there is none."""

_ITERATION_FOLDER = re.compile(r"iter_\d{7,}|release")


def wraps(session: Session) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """Return the seams of saves, with their wraps; `Loading` has those of loads."""
    saving = _Saving(session)
    # Megatron's training loop imports `save_checkpoint` and `load_checkpoint` by name.
    return [
        (Seam(f"{_MODULE}:save_checkpoint", _SAVE), around(saving.save)),
        (Seam(f"{_CALLERS}:save_checkpoint", _SAVE), around(saving.save)),
        (Seam(f"{_MODULE}:get_checkpoint_tracker_filename", ("checkpoints_path",)), around(saving.before_tracker)),
        (Seam(f"{_MODULE}:schedule_async_save", ("async_request",)), around(saving.schedule)),
        (Seam(f"{_CALLERS}:maybe_finalize_async_save", ("blocking",)), around(saving.finalize)),
    ]


def prove_saves(session: Session) -> None:
    """End the run on all ranks if one of them could not save its state. Collective over all ranks."""
    from megatron.training import get_args

    args = get_args()
    kinds = (False, True) if getattr(args, "non_persistent_ckpt_type", None) == "global" else (False,)
    with ends_the_run():
        rehearse(session, [Path(_save_folder(args, kind)) for kind in kinds if args.save and not args.no_save_optim])


class _Saving:
    """Wraps of Megatron's saves, which save the compression state beside them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._before_tracker: tuple[Path, Callable[[], None]] | None = None
        """On the first rank, during a save of Megatron's: the folder of checkpoints, and the function to call before
        Megatron writes its tracker file.
        """

        self._under_way: tuple[Save, Path] | None = None
        """With --async-save: a save whose files threads are writing, and its checkpoint; set on all ranks or on
        none.
        """

        self._thread = ThreadPoolExecutor(1)

    def save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args
        from megatron.training.checkpointing import get_checkpoint_name

        # Megatron, too, warns of a save that begins before the last one is done. There must be only one copy of the
        # state.
        self._finish()
        given, megatron_args = arguments_of(original, args, kwargs), get_args()
        if given["non_persistent_ckpt"] and megatron_args.non_persistent_ckpt_type == "local":
            return original(*args, **kwargs)  # local checkpoints: classes that keep state are refused with them
        folder = _save_folder(megatron_args, given["non_persistent_ckpt"])
        iteration_folder = Path(
            get_checkpoint_name(folder, given["iteration"], given.get("release", False), return_base_dir=True)
        )
        in_background = bool(megatron_args.async_save)
        vars(megatron_args).pop(_MARK, None)
        setattr(megatron_args, _LEVELS, self._session.levels_of_sums)
        setattr(megatron_args, _TRIAL, None if self._session.trial is None else self._session.trial.state)
        # starting a save removes an earlier save's files from this folder
        publish = partial(state_files.publish, None, iteration_folder)
        with ends_the_run():
            save = stage(self._session, Path(folder), given["iteration"], megatron_args, copied=in_background)
            if save is not None:
                setattr(megatron_args, _MARK, save.mark)
                publish = partial(save.put_in_place, iteration_folder)
                if not in_background:
                    save.finish_writing()
        if dist.get_rank() == 0 and not (save and in_background):
            self._before_tracker = Path(folder), publish
        try:
            result = original(*args, **kwargs)
        except RuntimeError:  # a barrier that the first rank has left
            with ends_the_run():
                _raise_what_the_first_rank_said()
            raise
        finally:
            self._before_tracker = None
        if save and in_background:  # our writer thread starts after Megatron's fork
            save.start_writing(self._thread)
            self._under_way = save, iteration_folder
        return result

    def schedule(self, original: Callable[..., Any], async_request: Any) -> Any:
        from megatron.training import get_args

        # All ranks call the finalize functions once their writers are done; the last function writes the tracker file.
        async_request.finalize_fns.insert(0, partial(self._finish, getattr(get_args(), _MARK, None)))
        return original(async_request)

    def finalize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        blocking = arguments_of(original, args, kwargs)["blocking"]
        if self._under_way and not blocking and not self._under_way[0].is_written():
            return None  # not written yet; the training loop calls `finalize` again after each iteration
        return original(*args, **kwargs)

    def before_tracker(self, original: Callable[..., Any], checkpoints_path: Any) -> Any:
        # The first rank asks for the tracker file's name when every rank's part of the checkpoint has been written.
        if self._before_tracker is not None and Path(checkpoints_path) == self._before_tracker[0]:
            with ends_the_run():  # the other ranks are in Megatron's barrier
                try:
                    self._before_tracker[1]()
                except OSError as error:
                    _store().set(_SAID, f"rank 0: {error}")
                    raise OptimusError(f"rank 0: {error}") from error
            self._before_tracker = None
        return original(checkpoints_path)

    def _finish(self, mark: str | None = None) -> None:
        """Put the files that threads write into their checkpoint: of the save with this mark, or of any save.
        Collective.
        """
        if self._under_way is None or mark not in (None, self._under_way[0].mark):
            return
        (save, iteration_folder), self._under_way = self._under_way, None
        with ends_the_run():
            save.finish_writing()
            save.publish(iteration_folder)


class Loading:
    """Wraps of Megatron's loads, which load the compression state after them: once there is a session that takes it."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._loaded: tuple[FoundCheckpoint, bool] | None = None
        """The checkpoint that Megatron has loaded, whose state no session has taken yet, and whether it is a
        release.
        """

        self._levels: str | None = None
        self._trial: dict[str, Any] | None = None
        self._found: list[tuple[FoundCheckpoint, bool]] = []
        """Checkpoints that the current load has found, and whether each is a release. Only the last one is loaded;
        Megatron merely looked at the others.
        """

    def wraps(self) -> list[tuple[Seam, Callable[[Any], Any]]]:
        return [
            (Seam(f"{_MODULE}:load_checkpoint", _LOAD), around(self._load)),
            (Seam(f"{_CALLERS}:load_checkpoint", _LOAD), around(self._load)),
            (Seam(f"{_MODULE}:_load_base_checkpoint", ("load_dir",)), around(self._note)),
        ]

    def resume(self, session: Session) -> None:
        """Let the session take the state of the checkpoint that Megatron has loaded, and of those that it will load.

        Collective over all ranks.
        """
        from megatron.training import get_args

        self._session = session
        if self._loaded is not None:
            (found, release), self._loaded = self._loaded, None
            with ends_the_run():
                resume(session, found, get_args(), release=release, trial=self._trial)
            self._compare_levels(session)

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._found.clear()
        result = original(*args, **kwargs)
        given = arguments_of(original, args, kwargs)
        # Other models are loaded, too: a teacher to distil, or a model to compare with.
        if self._found and given["load_arg"] == "load" and given["optimizer"] is not None:
            self._loaded = self._found[-1]
            if self._session is not None:
                self.resume(self._session)
        return result

    def _compare_levels(self, session: Session) -> None:
        """Say so if the checkpoint's run added gradients up in other levels, because sums are then rounded
        differently.
        """
        saved, now = self._levels, session.levels_of_sums
        if None not in (saved, now) and saved != now and dist.get_rank() == 0:
            say(
                f"optimus-cc: gradients are added up in {now} here, and in {saved} in the run that saved the "
                "checkpoint: sums are rounded differently, so the run does not go on to the bit"
            )

    def _note(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        state_dict, name, release, _ = result
        folder = next((p for p in (Path(name), *Path(name).parents) if _ITERATION_FOLDER.fullmatch(p.name)), None)
        if state_dict is not None and folder is not None:
            mark = getattr(state_dict.get("args"), _MARK, None)
            self._levels, self._trial = (getattr(state_dict.get("args"), name, None) for name in (_LEVELS, _TRIAL))
            self._found.append((FoundCheckpoint(folder, state_dict.get("iteration"), mark), release))
        return result


def _save_folder(args: Any, non_persistent: bool) -> str:
    """Return the folder of a checkpoint's iteration, as Megatron names it."""
    from megatron.training import checkpointing

    if not non_persistent:
        return str(args.save)
    return str(args.non_persistent_global_ckpt_dir or Path(args.save) / checkpointing._NON_PERSISTENT_CKPT_SUBDIR)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _raise_what_the_first_rank_said() -> None:
    """Raise OptimusError if the first rank has ended because it could not put a state into its checkpoint."""
    said = ""
    with suppress(RuntimeError):  # the store may have ended with the first rank
        if _store().check([_SAID]):
            said = _store().get(_SAID).decode()
    if said:
        raise OptimusError(said)
