"""How long an iteration takes on given links: a simulation of 1F1B, in seconds, without a process or a tensor.

It knows what compression can change: how long messages between stages travel, and what a stage does after its last
backward pass. The iteration ends when the last stage to finish has reduced its gradients, because the optimizer needs
the norm of all of them. So a stage whose dense reduction fits into its slack, the time that others still need, gains
nothing by compressing it; and one whose reduction does not fit is what everyone waits for, however early it began.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optimus_cc_ext.techniques.schedule import Message, Pass, Schedule

__all__ = [
    "MessageCost",
    "StageCost",
    "iteration_seconds",
    "last_backward_ends",
    "left_after_backward",
    "smallest_useful",
]

INDIFFERENT = 0.025
"""Relative differences of iteration times that are worth no accuracy, and that no measurement here could show."""


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """A gradient between two stages, in seconds."""

    travel: float
    compress: float = 0.0
    """What its sender computes before it leaves."""

    decompress: float = 0.0
    """What its receiver computes before it is of use."""

    remember: float = 0.0
    """What its sender computes once it has left."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What a stage computes, and how long what it sends travels, in seconds."""

    forward: float
    """One forward pass through one model chunk."""

    backward: float
    activation: float
    """One activation on its way to the next stage."""

    gradient: MessageCost
    """A gradient on its way to the stage before, as it is."""

    compressed_gradient: MessageCost
    """The same gradient as P and Q."""


def last_backward_ends(
    schedule: Schedule, costs: Sequence[StageCost], compressed: Callable[[Message], bool]
) -> list[float]:
    """When each stage's last backward pass is over, in seconds since the iteration began.

    What a stage sends leaves one message after the other, and its sender goes on meanwhile.

    Args:
        schedule: whose passes they are.
        costs: by stage.
        compressed: whether a message travels as P and Q.
    """
    clock = _Clock(schedule, costs, compressed)
    todo = [list(reversed(schedule.passes(stage))) for stage in range(schedule.stages)]
    while any(todo):
        moved = False
        for stage, passes in enumerate(todo):
            while passes and clock.run(stage, passes[-1]):
                passes.pop()
                moved = True
        if not moved:
            raise ValueError("a schedule whose passes wait for each other in a circle")
    return clock.free


def iteration_seconds(backward_ends: Sequence[float], reductions: Sequence[float], embedding: float) -> float:
    """When all gradients are reduced.

    Args:
        backward_ends: by stage, from `last_backward_ends`.
        reductions: by stage: its gradients' reduction over the replicas; where that begins before the last backward
            pass ends, only what is left of it then.
        embedding: the tied embedding's reduction, which starts when the first and the last stage have finished theirs.
    """
    ends = [end + reduction for end, reduction in zip(backward_ends, reductions, strict=True)]
    return max(*ends, max(ends[0], ends[-1]) + embedding)


def left_after_backward(reduction: float, backward: float, buckets: int) -> float:
    """What is left of a stage's reduction when its last backward pass ends, in seconds.

    Args:
        reduction: all of it, in seconds.
        backward: the last backward pass, during which every bucket but the last becomes complete, one after the other.
        buckets: how many there are; 1 where the reduction begins only after the pass.
    """
    return max(reduction / buckets, reduction - backward * (buckets - 1) / buckets)


def smallest_useful(backward_ends: Sequence[float], dense: Sequence[float], compressed: Sequence[float],
                    embedding: float) -> frozenset[int]:  # fmt: skip
    """The fewest stages whose compression makes the iteration as short as any choice can, within `INDIFFERENT`.

    Compression costs accuracy, so a stage whose dense reduction does not hold up the iteration stays dense.
    """
    best = [min(pair) for pair in zip(dense, compressed, strict=True)]
    shortest = iteration_seconds(backward_ends, best, embedding)
    chosen = {stage for stage, (plain, small) in enumerate(zip(dense, compressed, strict=True)) if small < plain}
    # The one that saves least is left out first.
    for stage in sorted(chosen, key=lambda stage: dense[stage] - compressed[stage]):
        without = [compressed[s] if s in chosen - {stage} else dense[s] for s in range(len(dense))]
        if iteration_seconds(backward_ends, without, embedding) <= shortest * (1 + INDIFFERENT):
            chosen.remove(stage)
    return frozenset(chosen)


class _Clock:
    """When each stage is free, when its sender is, and what has arrived where."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], compressed: Callable[[Message], bool]) -> None:
        self._stages, self._chunks, self._costs = schedule.stages, schedule.chunks, costs
        self.free = [0.0] * schedule.stages
        self._wire_free = [0.0] * schedule.stages
        self._arrived: dict[tuple[int, Pass], float] = {}
        self._messages = {
            receiver: iter([compressed(message) for message in schedule.messages(receiver)])
            for receiver in range(schedule.stages)
        }

    def run(self, stage: int, work: Pass) -> bool:
        """Do this pass, if what it needs has arrived."""
        ready = 0.0
        if (source := self._source(stage, work)) is not None:
            if source not in self._arrived:
                return False
            ready = self._arrived.pop(source)
        cost = self._costs[stage]
        begin = max(self.free[stage], ready)
        self.free[stage] = begin + (cost.forward if work.forward else cost.backward)
        self._send(stage, work)
        return True

    def _source(self, stage: int, work: Pass) -> tuple[int, Pass] | None:
        """The pass, here or on another stage, that this one gets its input from."""
        first, last = (0, 0), (self._stages - 1, self._chunks - 1)
        if work.forward:
            if (stage, work.chunk) == first:
                return None
            before = (stage - 1, work.chunk) if stage else (self._stages - 1, work.chunk - 1)
            return before[0], Pass(True, before[1], work.micro_batch)
        if (stage, work.chunk) == last:
            return stage, Pass(True, work.chunk, work.micro_batch)
        after = (stage + 1, work.chunk) if stage < self._stages - 1 else (0, work.chunk + 1)
        return after[0], Pass(False, after[1], work.micro_batch)

    def _send(self, stage: int, work: Pass) -> None:
        """Give the result to whoever waits for it."""
        cost, first, last = self._costs[stage], (0, 0), (self._stages - 1, self._chunks - 1)
        if work.forward and (stage, work.chunk) == last:
            self._arrived[stage, work] = self.free[stage]
        elif work.forward:
            self._arrived[stage, work] = self._travelled(stage, cost.activation)
        elif (stage, work.chunk) != first:
            receiver = (stage - 1) % self._stages
            message = cost.compressed_gradient if next(self._messages[receiver]) else cost.gradient
            self.free[stage] += message.compress
            self._arrived[stage, work] = self._travelled(stage, message.travel) + message.decompress
            self.free[stage] += message.remember

    def _travelled(self, stage: int, seconds: float) -> float:
        if self._stages == 1:
            return self.free[stage]
        self._wire_free[stage] = max(self._wire_free[stage], self.free[stage]) + seconds
        return self._wire_free[stage]
