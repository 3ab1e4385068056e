"""Wraps megatron/core/pipeline_parallel/schedules.py: each forward-backward pass is an iteration of the model's
session.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from optimus_cc_ext.announce import COMPRESSION_STATE, MESSAGE_BUFFERS, say
from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.config.presets import saves_nothing
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.hooks.p2p_communication import without_device_synchronisation
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.hooks.training import SETUP, STEP, training_device
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques.schedule import Interleaved, NonInterleaved, Schedule
from optimus_cc_ext.techniques.session import Session

_MODULE = "megatron.core.pipeline_parallel.schedules"
_INTERLEAVED = "forward_backward_pipelining_with_interleaving"
_SCHEDULES = ("forward_backward_no_pipelining", _INTERLEAVED, "forward_backward_pipelining_without_interleaving")


def wraps(sessions: Sessions) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """Return the seams of this file, with their wraps. Evaluation is forward only and passes through untouched."""
    parameters = ("num_microbatches", "forward_only", "model")
    return [
        (Seam(f"{_MODULE}:{name}", parameters), around(forward_backward, sessions, name == _INTERLEAVED))
        for name in _SCHEDULES
    ]


def forward_backward(
    sessions: Sessions,
    interleaved: bool,
    original: Callable[..., Any],
    *,
    num_microbatches: int,
    forward_only: bool = False,
    **rest: Any,
) -> Any:
    """Run Megatron's forward-backward pass as one iteration of each session that owns some of its model chunks."""
    chunks = _chunks(rest["model"])
    trained = () if forward_only else sessions.of(chunks)
    if sessions.awaits_model and not (trained or forward_only):
        raise OptimusError(
            f"this model was not made by {SETUP.replace(':', '.')}, so the flags of the command line do not compress "
            "it. Leave --optimus-cc and its flags out, and call optimus_cc_ext.compress(model, optimizer, ...)"
        )
    with ExitStack() as passes:
        for session in trained:
            if session.config.any_technique and not (session.follows_zeroing or session.step.open):
                raise OptimusError(
                    f"a forward-backward pass outside of {STEP.replace(':', '.')}, which tells where a step begins and "
                    "ends. Call that function, and not one that was imported before Optimus-CC"
                )
            number = len(chunks) if interleaved else None
            passes.enter_context(_iteration(session, chunks[0], number, num_microbatches, rest))
        passes.enter_context(sessions.passing(trained))
        return original(num_microbatches=num_microbatches, forward_only=forward_only, **rest)


@contextmanager
def _iteration(
    session: Session, chunk: Any, chunks: int | None, micro_batches: int, schedule_arguments: dict[str, Any]
) -> Iterator[None]:
    """Open one session's iteration for a pass over `chunks` interleaved model chunks; None: not interleaved."""
    from megatron.core.utils import get_model_config

    config = get_model_config(chunk)
    schedule = _schedule(session, config, chunks, micro_batches)
    gradient = _gradient(config, schedule_arguments)
    _prepare(session, schedule, gradient)
    with session.iteration(schedule, _loss_scale(config)), without_device_synchronisation(session, config):
        yield


def _chunks(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]


def _schedule(session: Session, config: Any, chunks: int | None, micro_batches: int) -> Schedule:
    """Return the order of a pass through the pipeline, interleaved over `chunks` model chunks per stage, or not
    (None).
    """
    assert session.grid is not None, "the session has no place in the grid yet"
    stages = session.grid.stages
    if chunks is None:
        return NonInterleaved(stages, micro_batches)
    return interleaved_schedule(stages, chunks, micro_batches, config.microbatch_group_size_per_vp_stage)


def _prepare(session: Session, schedule: Schedule, gradient: torch.Tensor | None) -> None:
    """Allocate state and message buffers before the first pass, and log them."""
    if session.preallocate(schedule, gradient):
        _announce_memory(session)
        _announce_without_gain(session, gradient)


def _gradient(config: Any, schedule_arguments: dict[str, Any]) -> torch.Tensor | None:
    """Return a tensor like the activation gradients, if their shape is known before the first one is sent; else
    None.
    """
    sequence, micro_batch = (schedule_arguments.get(name) for name in ("seq_length", "micro_batch_size"))
    if config.variable_seq_lengths or sequence is None or micro_batch is None:
        return None
    split = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shape = (sequence // (split * config.context_parallel_size), micro_batch, config.hidden_size)
    return torch.empty(1, dtype=config.pipeline_dtype, device=training_device()).expand(shape)


def _loss_scale(config: Any) -> torch.Tensor | None:
    """Return the factor by which this iteration's loss is multiplied, 0-dim, still on the device; None without
    scaling.
    """
    if not config.fp16 or config.grad_scale_func is None:
        return None
    return config.grad_scale_func(torch.ones((), device=training_device())).reshape(())


def _announce_memory(session: Session) -> None:
    """Log the memory of compression state and message buffers, on the rank where they are largest.

    Collective over all ranks of the model.
    """
    assert session.grid is not None
    everyone = session.grid.gather(
        ((session.backprop.states.nbytes, session.gradients.states.nbytes, session.message_bytes), _free_bytes())
    )
    taken, free = zip(*everyone, strict=True)
    session.most_memory = max(map(sum, taken))
    if not session.grid.is_first:
        return
    link, buckets, _ = max(taken, key=sum)
    messages = max(messages for *_, messages in taken)
    if any(technique.remembers for technique in session.techniques):
        say(
            f"optimus-cc: {COMPRESSION_STATE} in {session.config.compression_state_dtype}: up to "
            f"{(link + buckets) / 1e6:.1f} MB on a rank ({link / 1e6:.1f} MB pipeline link, {buckets / 1e6:.1f} MB "
            "gradient buckets)"
        )
    if messages:
        say(f"optimus-cc: {MESSAGE_BUFFERS} of gradients and parameters: up to {messages / 1e6:.1f} MB on a rank")
    if session.new_groups is not None and (line := session.new_groups.line) is not None:
        say(f"optimus-cc: {line}")
    if None not in free:
        say(f"optimus-cc: free GPU memory: at least {min(free) / 1e6:.0f} MB on each rank")


def _announce_without_gain(session: Session, gradient: torch.Tensor | None) -> None:
    """Print the classes of traffic that low rank shrinks on no rank, and the most buckets of a rank that compression
    does not shrink. Collective over all ranks of the model.
    """
    assert session.grid is not None
    shrinks = {technique.name: technique.shrinks(gradient) for technique in session.techniques}
    everyone = session.grid.gather((shrinks, session.gradients.unpaid))
    for traffic in CLASSES if session.grid.is_first else ():
        known = {answers[traffic.name] for answers, _ in everyone} - {None}
        dense, buckets = max(unpaid.get(traffic.name, (0, 0)) for _, unpaid in everyone)
        if session.config.format_of(traffic) == "low-rank" and known == {False}:
            say(f"optimus-cc: {saves_nothing(session.config, traffic)}")
        elif dense:
            say(
                f"optimus-cc: {traffic.tag}: {dense} of {buckets} buckets of a rank stay dense, because compression "
                "would send no fewer bytes"
            )


def _free_bytes() -> int | None:
    """Return the free bytes of this rank's GPU, with memory that PyTorch's allocator holds unused; None on a CPU."""
    device = training_device()
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@functools.lru_cache
def interleaved_schedule(stages: int, chunks: int, micro_batches: int, group_size: int) -> Interleaved:
    """Return Megatron's interleaved schedule for these numbers, from Megatron's own functions.

    Args:
        stages: number of pipeline stages.
        chunks: number of model chunks per stage.
        micro_batches: number of micro-batches.
        group_size: number of micro-batches that a stage runs through one chunk before it turns to the next chunk.
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
    """Stand-in for a pipeline group, as a stage that need not be this rank's sees it."""

    stages: int
    stage: int

    def size(self) -> int:
        return self.stages

    def rank(self) -> int:
        return self.stage


@dataclass(frozen=True)
class _AtStage:
    """Stand-in for the communicator from which Megatron computes a stage's warm-up."""

    pp_group: _Place
    virtual_pipeline_model_parallel_size: int
