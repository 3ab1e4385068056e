"""Wraps megatron/core/pipeline_parallel/schedules.py: an iteration begins and ends with a forward-backward pass."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Grid, Session
from optimus_cc_ext.techniques.schedule import Interleaved, NonInterleaved, Schedule

__all__ = ["interleaved_schedule", "wraps"]

_MODULE = "megatron.core.pipeline_parallel.schedules"
_INTERLEAVED = "forward_backward_pipelining_with_interleaving"
_SCHEDULES = ("forward_backward_no_pipelining", _INTERLEAVED, "forward_backward_pipelining_without_interleaving")


def wraps(session: Session, ensure_placed: Callable[[], None]) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seams of this file, with what wraps them. Evaluation is forward only and passes through untouched."""

    def wrap(name: str) -> Callable[[Any], Any]:
        def factory(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def forward_backward(*, num_microbatches: int, forward_only: bool = False, **rest: Any) -> Any:
                if forward_only:
                    return original(num_microbatches=num_microbatches, forward_only=True, **rest)
                ensure_placed()
                assert session.grid is not None
                schedule: Schedule = NonInterleaved(session.grid.stages, num_microbatches)
                if name == _INTERLEAVED:
                    schedule = _interleaved(session.grid, num_microbatches, rest["model"])
                with session.iteration(schedule):
                    return original(num_microbatches=num_microbatches, forward_only=False, **rest)

            return forward_backward

        return factory

    return [
        (Seam(f"{_MODULE}:{name}", ("num_microbatches", "forward_only", "model")), wrap(name)) for name in _SCHEDULES
    ]


def _interleaved(grid: Grid, micro_batches: int, model: list[Any]) -> Interleaved:
    from megatron.core.utils import get_model_config

    group_size = get_model_config(model[0]).microbatch_group_size_per_vp_stage
    return interleaved_schedule(grid.stages, len(model), micro_batches, group_size)


@functools.lru_cache
def interleaved_schedule(stages: int, chunks: int, micro_batches: int, group_size: int) -> Interleaved:
    """Megatron's interleaved schedule for these numbers, asked from Megatron itself.

    Args:
        stages: pipeline stages P.
        chunks: model chunks per stage V.
        micro_batches: M.
        group_size: micro-batches that a stage runs through one chunk before it turns to the next one.
    """
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    warmups = (
        get_pp_rank_microbatches(
            micro_batches, chunks, group_size, p2p_communicator=_AtStage(_Place(stages, stage), chunks)
        )[2]
        for stage in range(stages)
    )
    table = get_schedule_table(micro_batches, chunks, group_size)
    return Interleaved(stages, chunks, tuple(chunk for _, chunk in table), tuple(warmups))


@dataclass(frozen=True)
class _Place:
    """What Megatron asks of a pipeline group, for a stage that is not this rank's."""

    stages: int
    stage: int

    def size(self) -> int:
        return self.stages

    def rank(self) -> int:
        return self.stage


@dataclass(frozen=True)
class _AtStage:
    """What Megatron asks of a communicator to compute a stage's warm-up."""

    pp_group: _Place
    virtual_pipeline_model_parallel_size: int
