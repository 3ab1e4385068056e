"""Wraps megatron/training/training.py: which steps count, and what is logged."""

from collections.abc import Callable
from typing import Any

import torch

from optimus_cc_ext.devices import cpu_runtime
from optimus_cc_ext.hooks.registry import Seam, arguments_of
from optimus_cc_ext.metrics.report import ErrorAlarm
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP, clip_coefficient
from optimus_cc_ext.techniques.session import Session

__all__ = ["train_step", "training_device", "training_log", "wraps"]

_MODULE = "megatron.training.training"
_SKIPPED = 1
"""Where `train_step` returns whether the update was skipped, or left undone for an early exit."""

_GRADIENT_NORM = 5
"""Where it returns the norm before clipping, on the host; None where there was no update."""


def wraps(session: Session) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seams of this file, with what wraps them."""
    seams = [(Seam(f"{_MODULE}:train_step", ("iteration", "optimizer")), around(train_step, session))]
    if session.config.compression_metrics:
        seam = Seam(f"{_MODULE}:training_log", ("iteration", "is_first_iteration"))
        seams.append((seam, around(training_log, _Reporter(session))))
    return seams


def train_step(session: Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Tell the session where a step of Megatron's begins, and how it ended."""
    given = arguments_of(original, args, kwargs)
    iteration = given.get("iteration")
    measured = session.config.compression_metrics and iteration is not None and _due(iteration + 1)
    session.begin_step(iteration, measured=measured)
    result = original(*args, **kwargs)
    session.end_step(applied=not result[_SKIPPED], clip=_clip(given["optimizer"], result[_GRADIENT_NORM]))
    return result


def training_log(reporter: "_Reporter", original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Write our lines after Megatron's."""
    result = original(*args, **kwargs)
    reporter.log(arguments_of(original, args, kwargs)["iteration"])
    return result


def _clip(optimizer: Any, norm: float | None) -> dict[str, float]:
    """By gradient-norm group, what Megatron's optimizer multiplied this step's gradients by."""
    from megatron.training import get_args

    norms = {MAIN_NORM_GROUP: norm, **getattr(optimizer, "grad_norms_by_group", {})}
    return {group: clip_coefficient(get_args().clip_grad, norm) for group, norm in norms.items()}


def _due(iteration: int) -> bool:
    """Whether Megatron writes its log's line after this iteration (the first is 1).

    TensorBoard and W&B have every iteration by default: each would pay for copies of all that is compressed, a
    collective of all ranks and reads from the device.
    """
    from megatron.training import get_args

    return iteration % get_args().log_interval == 0


class _Reporter:
    """Collects what all ranks measured, at the logging intervals only, and writes it where Megatron writes."""

    def __init__(self, session: Session) -> None:
        self._session, self._alarm = session, ErrorAlarm()
        self._last_iteration: int | None = None

    def log(self, iteration: int) -> None:
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        if self._last_iteration is None:
            self._last_iteration = iteration - 1
        if not _due(iteration) or iteration == self._last_iteration:
            return
        report = self._session.report(training_device(), iteration - self._last_iteration)
        self._last_iteration = iteration
        if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return
        for line in (*report.lines(), *self._alarm.lines(report)):
            print(f"  optimus-cc {line}", flush=True)
        scalars = report.scalars()
        if writer := get_tensorboard_writer():
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if wandb := get_wandb_writer():
            wandb.log(scalars, iteration)


def training_device() -> torch.device:
    """Where this rank's model is, and so the tensors of its collectives, whatever their backend is called."""
    on_gpu = not cpu_runtime.is_active() and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
