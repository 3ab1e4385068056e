"""Wraps megatron/training/training.py: which steps count, and what is logged."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session
from optimus_cc_ext.traffic import TrafficClass

__all__ = ["wraps"]

_MODULE = "megatron.training.training"
_SKIPPED = 1
"""Where `train_step` returns whether the update was skipped, or left undone for an early exit."""


def wraps(session: Session) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seams of this file, with what wraps them."""
    seams: list[tuple[Seam, Callable[[Any], Any]]] = [
        (Seam(f"{_MODULE}:train_step", ("iteration",)), lambda original: _train_step(session, original))
    ]
    if session.config.compression_metrics:
        seam = Seam(f"{_MODULE}:training_log", ("iteration", "is_first_iteration"))
        seams.append((seam, lambda original: _training_log(session, original)))
    return seams


def _train_step(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        session.begin_step(signature.bind(*args, **kwargs).arguments.get("iteration"))
        result = original(*args, **kwargs)
        session.end_step(applied=not result[_SKIPPED])
        return result

    return train_step


def _training_log(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    report = _TrafficReport(session)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        report.log(given["iteration"])
        return result

    return training_log


class _TrafficReport:
    """Sums the traffic of all ranks, at the logging intervals only, and writes it where Megatron writes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._reported = [0] * len(session.traffic.as_list())
        self._last_iteration: int | None = None

    def log(self, iteration: int) -> None:
        from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

        args = get_args()
        to_writers = iteration % args.tensorboard_log_interval == 0 and args.tensorboard_dir is not None
        to_terminal = iteration % args.log_interval == 0
        if self._last_iteration is None:
            self._last_iteration = iteration - 1
        if not (to_terminal or to_writers) or iteration == self._last_iteration:
            return
        per_iteration = self._collect(iteration)
        if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return
        if to_terminal:
            print(f"  optimus-cc traffic per iteration | {_line(per_iteration)}", flush=True)
        for traffic_class, (raw, sent) in per_iteration.items():
            scalars = {
                f"optimus-cc/{traffic_class.value} raw bytes": raw,
                f"optimus-cc/{traffic_class.value} sent bytes": sent,
            }
            if writer := get_tensorboard_writer():
                for name, value in scalars.items():
                    writer.add_scalar(name, value, iteration)
            if wandb := get_wandb_writer():
                wandb.log(scalars, iteration)

    def _collect(self, iteration: int) -> dict[TrafficClass, tuple[float, float]]:
        """(raw, sent) bytes per iteration by class, of all ranks together, since the last report."""
        assert self._last_iteration is not None
        counts = self._session.traffic.as_list()
        device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda() else torch.device("cpu")
        fresh = torch.tensor(
            [now - before for now, before in zip(counts, self._reported, strict=True)],
            dtype=torch.int64,
            device=device,
        )
        torch.distributed.all_reduce(fresh)
        values = [value / (iteration - self._last_iteration) for value in fresh.tolist()]
        self._reported, self._last_iteration = counts, iteration
        pairs = zip(values[::2], values[1::2], strict=True)
        return dict(zip(TrafficClass, pairs, strict=True))


def _on_cuda() -> bool:
    return torch.distributed.get_backend() == "nccl"


def _line(per_iteration: dict[TrafficClass, tuple[float, float]]) -> str:
    parts = []
    for traffic_class, (raw, sent) in per_iteration.items():
        if raw:
            parts.append(f"{traffic_class.value}: {sent / 1e6:.3f} of {raw / 1e6:.3f} MB ({100 * sent / raw:.1f} %)")
    return " | ".join(parts) or "none"
