"""Runs of the tiny GPT that save and resume, and what tests ask about them."""

import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

import optimus_cc_ext
from tests.megatron.optimus_runs import PP2_DP2, install, without_forecast
from tests.megatron_runs import MegatronRun, hash_of, run_megatron

__all__ = [
    "CB_FE_SC",
    "SAVE_EVERY",
    "SHORT",
    "Tee",
    "assert_goes_on",
    "install_and_watch",
    "only",
    "run",
    "saving_facts",
]

SAVE_EVERY = 2
CB_FE_SC = [
    *("--compressed-backprop", "--compressed-backprop-rank", "4", "--compressed-backprop-messages", "all"),
    *("--residual-across-iterations", "carry"),  # so that a resumed run needs what the last one left
    *("--fused-embedding-sync", "--dp-compression", "--dp-compression-rank", "4"),
]
SHORT = ["--global-batch-size", "8", "--lr-decay-iters", "8", "--train-iters", "8"]


class Tee:
    """What this rank printed."""

    printed: Sequence[str] = ()

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._text = stream, ""

    def write(self, text: str) -> int:
        self._text += text
        Tee.printed = self._text.splitlines()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


saves: list[dict[str, Any]] = []
"""Of this rank: what was there each time that Megatron came to its tracker file, or gave a save to the background."""


def install_and_watch() -> None:
    """Optimus-CC as the launcher installs it; notes what it prints, and what every save leaves behind and when."""
    from megatron.training import checkpointing

    sys.stdout = Tee(sys.stdout)  # type: ignore[assignment]
    tracker_name, schedule = checkpointing.get_checkpoint_tracker_filename, checkpointing.schedule_async_save

    def state(folder: str) -> dict[str, Any]:
        tracker = Path(tracker_name(folder))
        return {
            "whole": [p.parent.parent.name for p in sorted(Path(folder).glob("iter_*/optimus_cc/topology.json"))],
            "tracker": tracker.read_text() if tracker.exists() else None,
        }

    @functools.wraps(tracker_name)
    def noting_tracker(checkpoints_path: str) -> str:
        saves.append({"tracker's turn": state(checkpoints_path)})
        return tracker_name(checkpoints_path)

    @functools.wraps(schedule)
    def noting_schedule(request: Any) -> None:
        from megatron.training import get_args

        saves.append({"background": state(get_args().save)})
        schedule(request)

    checkpointing.get_checkpoint_tracker_filename = noting_tracker
    checkpointing.schedule_async_save = noting_schedule
    install()


def saving_facts(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    """What the session remembers at the end, by hash; our lines; and what each save left behind."""
    session = optimus_cc_ext.current_session()
    return {
        "remembered": None if session is None else _hashed(session.state_dict()),
        "ours": [line.removeprefix("optimus-cc: ") for line in Tee.printed if line.startswith("optimus-cc: ")],
        "saves": saves,
    }


def _hashed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return hash_of(value)
    if isinstance(value, dict):
        return {key: _hashed(item) for key, item in value.items()}
    return [_hashed(item) for item in value] if isinstance(value, list) else value


def run(flags: Sequence[str], layout: tuple[int, Sequence[str]] = PP2_DP2, **kwargs: Any) -> list[MegatronRun]:
    """Train 8 short iterations with these flags, from the start or from a checkpoint."""
    world_size, layout_flags = layout
    kwargs.setdefault("before", install_and_watch)
    kwargs.setdefault("probe", saving_facts)
    return run_megatron(world_size, [*layout_flags, *SHORT, *without_forecast(flags)], **kwargs)


def only(folder: Path, iteration: int, copy_to: Path) -> Path:
    """A folder of checkpoints in which this iteration of `folder` is the latest, and the only one; a copy."""
    name = f"iter_{iteration:07d}"
    shutil.copytree(folder / name, copy_to / name)
    (copy_to / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return copy_to


def assert_goes_on(resumed: Sequence[MegatronRun], whole: Sequence[MegatronRun], iteration: int) -> None:
    """A run that was resumed after `iteration` iterations is the rest of the whole one, to the bit."""
    parts: dict[str, Callable[[MegatronRun], Any]] = {
        "losses": lambda run: run.losses,
        "norms of the gradients": lambda run: run.grad_norms,
        "random states": lambda run: run.random_states,
    }
    for rank, (mine, its) in enumerate(zip(resumed, whole, strict=True)):
        for name, part in parts.items():
            assert part(mine) == part(its)[iteration:], f"{name} of rank {rank}, resumed at {iteration}"
        assert mine.weights == its.weights, f"weights of rank {rank}, resumed at {iteration}"
        assert mine.probed["remembered"] == its.probed["remembered"], f"state of rank {rank}, resumed at {iteration}"
