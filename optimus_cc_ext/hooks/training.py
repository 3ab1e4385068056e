"""Wraps megatron/training/training.py: tells the session which steps are applied, and writes our log lines."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from optimus_cc_ext.announce import say
from optimus_cc_ext.hooks.registry import Seam, arguments_of
from optimus_cc_ext.metrics.report import ErrorAlarm, Report
from optimus_cc_ext.metrics.summary import Compared, Summary
from optimus_cc_ext.metrics.traffic import FALLBACK
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP, clip_coefficient
from optimus_cc_ext.techniques.session import Session

_MODULE = "megatron.training.training"
SETUP, STEP = f"{_MODULE}:setup_model_and_optimizer", f"{_MODULE}:train_step"
_SKIPPED = 1
"""Index of `skipped_iter` in `train_step`'s return tuple: true if the update was skipped, or left out for an early
exit.
"""

_EXITS = 3
"""Index of `should_exit` in `train_step`'s return tuple: true if Megatron's checks of a step end the run."""

_GRADIENT_NORM = 5
"""Index of the norm before clipping in `train_step`'s return tuple: a number on the host; None without an update."""


def wraps(session: Session, before_first: Callable[[], None]) -> list[tuple[Seam, Callable[[Any], Any]]]:
    reporter = _Reporter(session)
    seams = [(Seam(STEP, ("optimizer",)), around(train_step, session, reporter, [before_first]))]
    if session.config.compression_metrics:
        seams += [
            (Seam(f"{_MODULE}:training_log", ("iteration",)), around(training_log, reporter)),
            (Seam(f"{_MODULE}:checkpoint_and_decide_exit", ("iteration",)), around(decide_exit, reporter)),
        ]
    return seams


def train_step(
    session: Session,
    reporter: "_Reporter",
    first: list[Callable[[], None]],
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Tell the session that a step of Megatron's begins, and how it ended.

    Args:
        first: functions to call before the first step; they are removed then.
    """
    from megatron.training import get_args

    while first:
        first.pop()()
    reporter.begin_step()
    given = arguments_of(original, args, kwargs)
    iteration = given.get("iteration")
    if iteration is None:  # 0.16.0rc0 and older versions have no such parameter
        iteration = getattr(get_args(), "curr_iteration", None)
    measured = session.config.compression_metrics and iteration is not None and _due(iteration + 1)
    session.begin_step(iteration, measured=measured)
    try:
        result = original(*args, **kwargs)
    except BaseException:
        reporter.end()
        raise
    if result[_EXITS]:
        reporter.end()
    session.end_step(applied=not result[_SKIPPED], clip=_clip(given["optimizer"], result[_GRADIENT_NORM]))
    return result


def training_log(reporter: "_Reporter", original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Write our log lines after Megatron's."""
    result = original(*args, **kwargs)
    reporter.log(arguments_of(original, args, kwargs)["iteration"])
    return result


def decide_exit(reporter: "_Reporter", original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sum the run up if it ends early: at an interval, after a time, or by a signal, on which all ranks agree."""
    exits = original(*args, **kwargs)
    if exits:
        reporter.end(arguments_of(original, args, kwargs)["iteration"])
    return exits


def _clip(optimizer: Any, norm: float | None) -> dict[str, float]:
    """Return the factor by which Megatron's optimizer multiplied this step's gradients, by gradient-norm group."""
    from megatron.training import get_args

    norms = {MAIN_NORM_GROUP: norm, **getattr(optimizer, "grad_norms_by_group", {})}
    return {group: clip_coefficient(get_args().clip_grad, norm) for group, norm in norms.items()}


def _due(iteration: int) -> bool:
    """Return whether Megatron writes its log line after this iteration (the first is 1).

    Our metrics follow the log, although TensorBoard and W&B have every iteration by default: every measured iteration
    takes copies of all compressed tensors, a collective of all ranks and reads from the device.
    """
    from megatron.training import get_args

    return iteration % get_args().log_interval == 0


class _Reporter:
    """Collects the metrics of all ranks, at the logging intervals only, and writes them where Megatron writes its
    own.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._alarm, self._summary = session, ErrorAlarm(), Summary()
        self._last_iteration: int | None = None
        """Last iteration of the last report, or before the first one; None: no iteration has ended."""

        self._writes = False
        """True on the rank on which Megatron writes its log, once there is a report."""

        self._ended = False
        self._began: float | None = None
        """Time at which the first step since the last report began; None: none has begun."""

        self._logged = 0.0
        """Time at which Megatron had logged the last iteration; evaluation and checkpoints come after it."""

    def begin_step(self) -> None:
        self._began = self._began or time.perf_counter()

    def log(self, iteration: int) -> None:
        from megatron.training import get_args

        self._logged = time.perf_counter()
        if self._last_iteration is None:
            self._last_iteration = iteration - 1
        if _due(iteration) and iteration != self._last_iteration:
            self._write(self._collect(iteration), iteration)
        if iteration == get_args().train_iters:
            self.end(iteration)

    def end(self, iteration: int | None = None) -> None:
        """Write the line about the whole run, once.

        Args:
            iteration: last iteration, up to which all ranks report; None: those up to the last report count, because
                other ranks may have ended.
        """
        if self._ended:
            return
        self._ended = True
        if iteration is not None and self._last_iteration not in (None, iteration):
            self._collect(iteration)
        if self._writes and self._session.config.any_technique:
            say(f"optimus-cc: {self._summary.line(self._compared())}")

    def _compared(self) -> Compared | None:
        return None if self._session.trial is None else self._session.trial.compared

    def _collect(self, iteration: int) -> Report:
        """Return the report of all ranks about the iterations since the last one."""
        assert self._last_iteration is not None
        # Megatron's log has waited for the device. What it does between its log and the next step is not timed.
        iterations, compared = iteration - self._last_iteration, self._compared()
        seconds = {"iteration": (self._logged - (self._began or self._logged)) / iterations}
        if compared is not None:
            seconds |= {"dense trial": compared.dense, "compressed trial": compared.compressed}
        self._last_iteration, self._began = iteration, None
        report = replace(self._session.report(training_device(), iterations), seconds=seconds)
        self._summary.add(report, iterations)
        self._writes = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return report

    def _write(self, report: Report, iteration: int) -> None:
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        if not self._writes:
            return
        for line in (*report.lines(), *self._alarm.lines(report)):
            say(f"  optimus-cc {line}")
        scalars = report.scalars()
        if writer := get_tensorboard_writer():
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
            if report.fallback is not None:
                writer.add_text(FALLBACK, report.fallback, iteration)
        if wandb := get_wandb_writer():
            wandb.log(scalars, iteration)


def training_device() -> torch.device:
    """Return the device of this rank's model, and so of its collectives' tensors, whatever their backend is called."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.empty(0, device=torch.cuda.current_device()).device  # a CPU's where one stands in for CUDA
