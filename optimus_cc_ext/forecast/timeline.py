"""How long an iteration takes on given links: a simulation of 1F1B, in seconds, without a process or a tensor.

It ends when the last stage to finish has reduced its gradients, because the optimizer needs the norm of all of them. So
a stage whose dense reduction fits into its slack, the time that others still need, gains nothing by compressing it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optimus_cc_ext.techniques.schedule import Message, Pass, Schedule

__all__ = ["StageCost", "iteration_seconds", "last_backward_ends", "left_after_backward", "smallest_useful"]

INDIFFERENT = 0.025
"""Relative differences of iteration times that are worth no accuracy, and that no measurement here could show."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What a stage computes, and how long what it sends travels, in seconds."""

    forward: float
    """One forward pass through one model chunk."""

    backward: float
    activation: float
    """One activation on its way to the next stage, as it is."""

    gradient: float
    """A gradient on its way to the stage before, as it is."""

    compressed_gradient: float
    """The same gradient, compressed."""

    compress: float = 0.0
    """What its sender computes before it leaves."""

    decompress: float = 0.0
    """What its receiver computes before it is of use."""

    remember: float = 0.0
    """What its sender computes once it has left."""

    compressed_activation: float = 0.0
    """The same activation, compressed."""

    encode: float = 0.0
    """What its sender computes before it leaves."""

    decode: float = 0.0
    """What its receiver computes before it is of use."""


def last_backward_ends(
    schedule: Schedule,
    costs: Sequence[StageCost],
    compressed: Callable[[Message], bool],
    *,
    compressed_activations: bool = False,
    observe: Callable[[int, Pass | None, float, float], None] | None = None,
) -> list[float]:
    """When each stage's last backward pass is over, in seconds since the iteration began.

    What a stage sends leaves one message after the other, and its sender goes on meanwhile.

    Args:
        schedule: whose passes they are; ValueError where they wait for each other in a circle.
        costs: by stage.
        compressed: whether a gradient travels compressed.
        compressed_activations: whether activations do.
        observe: is told of everything as it happens: stage, pass (None: a message leaves it), begin and end.
    """
    stages, last = schedule.stages, schedule.stages * schedule.chunks - 1
    free, link_free = [0.0] * stages, [0.0] * stages
    todo = [deque(schedule.passes(stage)) for stage in range(stages)]
    messages = [map(compressed, schedule.messages(receiver)) for receiver in range(stages)]
    # When what a pass gives to the next one is there: by direction, place (chunk * stages + stage) and micro-batch.
    arrived = {(True, -1, work.micro_batch): 0.0 for work in todo[0]}

    def travel(stage: int, seconds: float) -> float:
        begin = max(link_free[stage], free[stage])
        link_free[stage] = begin + seconds
        if observe:
            observe(stage, None, begin, link_free[stage])
        return link_free[stage]

    def run(stage: int, work: Pass) -> bool:
        cost, place = costs[stage], work.chunk * stages + stage
        from_the_loss = not work.forward and place == last
        source = place if from_the_loss else place - 1 if work.forward else place + 1
        ready = arrived.get((work.forward or from_the_loss, source, work.micro_batch))
        if ready is None:
            return False
        begin = max(free[stage], ready)
        free[stage] = begin + (cost.forward if work.forward else cost.backward)
        if observe:
            observe(stage, work, begin, free[stage])
        result = work.forward, place, work.micro_batch
        if work.forward and place == last:
            arrived[result] = free[stage]
        elif work.forward and compressed_activations:
            free[stage] += cost.encode
            arrived[result] = travel(stage, cost.compressed_activation) + cost.decode
        elif work.forward:
            arrived[result] = travel(stage, cost.activation)
        elif place > 0:
            if next(messages[stage - 1]):
                free[stage] += cost.compress
                arrived[result] = travel(stage, cost.compressed_gradient) + cost.decompress
                free[stage] += cost.remember
            else:
                arrived[result] = travel(stage, cost.gradient)
        return True

    while any(todo):
        before = sum(map(len, todo))
        for stage, passes in enumerate(todo):
            while passes and run(stage, passes[0]):
                passes.popleft()
        if sum(map(len, todo)) == before:
            raise ValueError("a schedule whose passes wait for each other in a circle")
    return free


def iteration_seconds(backward_ends: Sequence[float], reductions: Sequence[float], embedding: float) -> float:
    """When all gradients are reduced.

    Args:
        backward_ends: by stage, from `last_backward_ends`.
        reductions: by stage: what is left of its gradients' reduction over the replicas then.
        embedding: the tied embedding's reduction, which starts when the first and the last stage have finished theirs.
    """
    ends = [end + reduction for end, reduction in zip(backward_ends, reductions, strict=True)]
    return max(*ends, max(ends[0], ends[-1]) + embedding)


def left_after_backward(reduction: float, backward: float, buckets: int) -> float:
    """What is left of a stage's `reduction` when its last backward pass ends, all in seconds.

    Of its `buckets` every one but the last becomes complete during that pass; 1: the reduction begins after it.
    """
    return max(reduction / buckets, reduction - backward * (buckets - 1) / buckets)


def smallest_useful(
    backward_ends: Sequence[float], dense: Sequence[float], compressed: Sequence[float], embedding: float
) -> frozenset[int]:
    """The fewest stages whose compression makes the iteration as short as any choice can, within `INDIFFERENT`.

    Compression costs accuracy, so a stage whose dense reduction does not hold up the iteration stays dense.
    """

    def seconds(chosen: frozenset[int]) -> float:
        reductions = [compressed[s] if s in chosen else dense[s] for s in range(len(dense))]
        return iteration_seconds(backward_ends, reductions, embedding)

    chosen = frozenset(s for s in range(len(dense)) if compressed[s] < dense[s])
    shortest = seconds(chosen)
    # The one that saves least is left out first.
    for stage in sorted(chosen, key=lambda s: dense[s] - compressed[s]):
        if seconds(chosen - {stage}) <= shortest * (1 + INDIFFERENT):
            chosen -= {stage}
    return chosen
