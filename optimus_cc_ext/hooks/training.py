"""Wraps megatron/training/training.py: which steps count, and what is logged."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.metrics.report import collect
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP, clip_coefficient

__all__ = ["device_of_collectives", "wraps"]

_MODULE = "megatron.training.training"
_SKIPPED = 1
"""Where `train_step` returns whether the update was skipped, or left undone for an early exit."""

_GRADIENT_NORM = 5
"""Where it returns the norm before clipping, on the host; None where there was no update."""


def wraps(session: Session) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seams of this file, with what wraps them."""
    seams: list[tuple[Seam, Callable[[Any], Any]]] = [
        (Seam(f"{_MODULE}:train_step", ("iteration", "optimizer")), lambda original: _train_step(session, original))
    ]
    if session.config.compression_metrics:
        seam = Seam(f"{_MODULE}:training_log", ("iteration", "is_first_iteration"))
        seams.append((seam, lambda original: _training_log(session, original)))
    return seams


def _train_step(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        iteration = given.get("iteration")
        measured = session.config.compression_metrics and iteration is not None and any(_due(iteration + 1))
        session.begin_step(iteration, measured=measured)
        result = original(*args, **kwargs)
        session.end_step(applied=not result[_SKIPPED], clip=_clip(given["optimizer"], result[_GRADIENT_NORM]))
        return result

    return train_step


def _clip(optimizer: Any, norm: float | None) -> dict[str, float]:
    """By gradient-norm group, what Megatron's optimizer multiplied this step's gradients by."""
    from megatron.training import get_args

    norms = {MAIN_NORM_GROUP: norm, **getattr(optimizer, "grad_norms_by_group", {})}
    return {group: clip_coefficient(get_args().clip_grad, norm) for group, norm in norms.items()}


def _training_log(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    reporter = _Reporter(session)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        reporter.log(given["iteration"])
        return result

    return training_log


def _due(iteration: int) -> tuple[bool, bool]:
    """Whether Megatron writes to the terminal, and to TensorBoard or W&B, after this iteration (the first is 1)."""
    from megatron.training import get_args

    args = get_args()
    has_writer = args.tensorboard_dir is not None or bool(getattr(args, "wandb_project", ""))
    return iteration % args.log_interval == 0, has_writer and iteration % args.tensorboard_log_interval == 0


class _Reporter:
    """Collects what all ranks measured, at the logging intervals only, and writes it where Megatron writes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._reported = [0] * len(session.traffic.as_list())
        self._last_iteration: int | None = None

    def log(self, iteration: int) -> None:
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        to_terminal, to_writers = _due(iteration)
        if self._last_iteration is None:
            self._last_iteration = iteration - 1
        if not (to_terminal or to_writers) or iteration == self._last_iteration:
            return
        counts = self._session.traffic.as_list()
        fresh = [now - before for now, before in zip(counts, self._reported, strict=True)]
        report = collect(self._session, fresh, iteration - self._last_iteration, device_of_collectives())
        self._reported, self._last_iteration = counts, iteration
        if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return
        if to_terminal:
            for line in report.lines():
                print(f"  optimus-cc {line}", flush=True)
        scalars = report.scalars()
        if writer := get_tensorboard_writer():
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if wandb := get_wandb_writer():
            wandb.log(scalars, iteration)


def device_of_collectives() -> torch.device:
    """Where the default group's collectives take their tensors."""
    on_gpu = torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
