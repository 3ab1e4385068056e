"""Seconds of an iteration on given links: the cost of each class of traffic, and a simulation of 1F1B. Needs no torch.

The gradients of an iteration are reduced when the last stage has reduced its own, because the optimizer needs the norm
of all of them. So compression gains nothing on a stage whose dense reduction fits into its slack, the time that other
stages still need.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES, classes_among
from optimus_cc_ext.techniques.schedule import Pass, Schedule


class When(Enum):
    """Place of a class's seconds in an iteration."""

    FORWARD_PASS = "inside every forward pass"
    BACKWARD_PASS = "inside every backward pass"
    ACTIVATION = "on the message that follows a forward pass"
    GRADIENT = "on the message that follows a backward pass"
    AFTER_BACKWARD = "after a stage's last backward pass, or beside it"
    AFTER_STEP = "after the optimizer's step"


class Link(Enum):
    """The ranks between which the messages of a class of traffic are sent."""

    TENSOR = "tensor-parallel ranks"
    EXPERTS = "ranks over which the experts of a layer are dealt out"
    CONTEXT = "ranks that share a sequence"
    STAGES = "neighbouring stages"
    REPLICAS = "replicas"
    ENDS = "the first and the last stage, once both have reduced their gradients over the replicas"


@dataclass(frozen=True)
class Rate:
    """A link on which a transfer of n bytes takes latency + n / bytes_per_second seconds."""

    latency: float
    bytes_per_second: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that `nbytes` take; no bytes take no time."""
        return self.latency + nbytes / self.bytes_per_second if nbytes else 0.0

    def sent(self, nbytes: float, *, encode: float = 0.0, decode: float = 0.0, remember: float = 0.0) -> "Sent":
        """Return a transfer of `nbytes` on this link, with the seconds of both ends."""
        return Sent(nbytes=nbytes, transfer=self.seconds(nbytes), encode=encode, decode=decode, remember=remember)

    def then(self, other: "Rate", share: float) -> "Rate":
        """Return the rate of messages of which the part `share` is sent on the link `other` after the rest has
        arrived.
        """
        seconds = (1 - share) / self.bytes_per_second + share / other.bytes_per_second
        return Rate(self.latency + other.latency, 1 / seconds if seconds else float("inf"))


FREE = Rate(0.0, float("inf"))
"""Link of a rank that has no peer to send to: it takes no time."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One transfer of a class, in one format: bytes of one rank, and seconds of the link and of both ends."""

    nbytes: float = 0.0
    transfer: float = 0.0
    """Seconds on the link."""

    encode: float = 0.0
    """Seconds that the sender encodes before the message leaves."""

    decode: float = 0.0
    """Seconds that the receiver decodes before it can use the message."""

    remember: float = 0.0
    """Seconds that the sender needs for its residual, after the message has left."""

    second_phase: float = 0.0
    """Seconds of the second phase of a reduction, which begins only when the next bucket is complete: factors Q, or the
    gather of sums.
    """


def reduction(link: Rate, nbytes: float, coding: float, second_phase: float, later: Rate | None = None) -> Sent:
    """Return the costs of a compressed reduction in two phases. Each phase has its share of the bytes and of the
    `coding` seconds.

    Args:
        second_phase: share of the second phase in bytes and seconds.
        later: the link of the second phase; None: the same link.
    """
    first = link.seconds(nbytes * (1 - second_phase)) + coding * (1 - second_phase)
    then = (later or link).seconds(nbytes * second_phase) + coding * second_phase
    return Sent(nbytes=nbytes, transfer=first, second_phase=then)


@dataclass(frozen=True)
class ClassCost:
    """Bytes and seconds of a class of traffic on one rank, dense and compressed, with their place in the iteration and
    their link.

    A class that is sent over two links, as the tied embedding, has one ClassCost for each of them.
    """

    name: str
    when: When
    link: Link
    dense: Sent
    compressed: Sent


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """Costs of one rank in an iteration. Ranks of one stage have the same classes in the same order."""

    stage: int
    forward: float
    """Seconds of one forward pass through one model chunk."""

    backward: float
    classes: tuple[ClassCost, ...] = ()
    buckets: int = 1
    """Number of gradient buckets that are reduced during the last backward pass; 1: the reduction begins after it."""

    last_passes: int = 1
    """Number of backward passes during which these buckets are reduced."""


@dataclass(frozen=True)
class Switches:
    """Choice of the stages that compress each class of traffic."""

    stages: Mapping[str, frozenset[int]]
    epilogue_only: bool = False
    """True if only activation gradients that arrive in the receiver's cooldown are compressed."""

    @classmethod
    def of(cls, config: OptimusConfig, stages: int) -> "Switches":
        """Return the switches of `config` on a pipeline of `stages` stages: a class is compressed on all stages or on
        none.
        """
        # Where one class of tokens goes once a node, the other one does, too.
        tokens = classes_among("experts")
        on = [each for each in CLASSES if config.is_on(each) or (each in tokens and any(map(config.is_on, tokens)))]
        return cls(
            {each.tag: frozenset(range(stages)) for each in on},
            epilogue_only=config.compressed_backprop_messages == "epilogue",
        )

    def where(self, name: str, stages: frozenset[int]) -> "Switches":
        """Return these switches with one change: the class `name` is compressed on `stages` only."""
        return replace(self, stages={**self.stages, name: stages})

    def sent(self, cost: ClassCost, stage: int) -> Sent:
        """Return the cost of a class on `stage`: compressed if the stage compresses it, else dense."""
        return cost.compressed if stage in self.stages.get(cost.name, ()) else cost.dense


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Seconds of a stage's passes, and its messages in the format in which they are sent."""

    forward: float
    backward: float
    activation: Sent = Sent()
    gradient: Sent = Sent()
    """Activation gradient that this stage sends back."""

    epilogue: Sent = Sent()
    """Activation gradient that this stage sends back while its receiver is in its cooldown."""


@dataclass(frozen=True, kw_only=True)
class IterationTimes:
    """Seconds of an iteration without the optimizer's step."""

    costs: tuple[StageCost, ...]
    """Costs of each stage's passes and messages that were simulated."""

    ends: tuple[float, ...]
    """End of each stage's last backward pass, in seconds since the iteration's beginning."""

    reductions: tuple[float, ...]
    """Seconds of each stage's gradient reduction that are left at the end of its last backward pass."""

    embedding: float
    """Seconds of the tied embedding's sum over the first and the last stage, which follows their reductions."""

    after_step: float

    @property
    def reduced(self) -> float:
        """Seconds from the iteration's beginning until all gradients are reduced."""
        return reduced_after(self.ends, self.reductions, self.embedding)


def iteration(
    ranks: Sequence[RankCost],
    schedule: Schedule,
    switches: Switches,
    *,
    contention: float = 0.0,
    simulate: Callable[[Schedule, tuple[StageCost, ...]], Sequence[float]] | None = None,
) -> IterationTimes:
    """Compute the times of one iteration.

    Args:
        ranks: at least one rank of each stage. A stage's passes take the mean of its ranks' seconds, its messages and
            its reduction those of its slowest rank.
        schedule: the passes and messages of the iteration.
        switches: which classes are compressed, on which stages.
        contention: seconds that computation loses for each second of a reduction that runs at the same time.
        simulate: finds the ends of the backward passes; None: `last_backward_ends`.
    """
    by_stage = [[rank for rank in ranks if rank.stage == stage] for stage in range(schedule.stages)]
    costs = tuple(_stage_cost(alike, switches) for alike in by_stage)
    after = [
        max(sum(sent.transfer + sent.encode for sent in _sent(rank, switches, when, link)) for rank in ranks)
        for when, link in ((When.AFTER_BACKWARD, Link.ENDS), (When.AFTER_STEP, Link.REPLICAS))
    ]
    return IterationTimes(
        costs=costs,
        ends=tuple((simulate or last_backward_ends)(schedule, costs)),
        reductions=tuple(max(_left_to_reduce(rank, switches, contention) for rank in alike) for alike in by_stage),
        embedding=after[0],
        after_step=after[1],
    )


def _sent(rank: RankCost, switches: Switches, when: When, link: Link | None = None) -> list[Sent]:
    """Return the transfers of a rank in one place of the iteration, in the format in which its stage sends them."""
    return [
        switches.sent(cost, rank.stage)
        for cost in rank.classes
        if cost.when is when and (link is None or cost.link is link)
    ]


def _pass_seconds(rank: RankCost, switches: Switches, when: When) -> float:
    """Return the seconds of one pass, including the transfers inside it."""
    computed = rank.forward if when is When.FORWARD_PASS else rank.backward
    return computed + sum(sent.transfer + sent.encode + sent.decode for sent in _sent(rank, switches, when))


def _message(ranks: Sequence[RankCost], switches: Switches, when: When) -> Sent:
    """Return a stage's message: the slowest transfer among its ranks, and the mean of their encoding and decoding."""
    found = [sent for rank in ranks for sent in _sent(rank, switches, when)] or [Sent()]
    return Sent(
        nbytes=max(sent.nbytes for sent in found),
        transfer=max(sent.transfer for sent in found),
        encode=fmean(sent.encode for sent in found),
        decode=fmean(sent.decode for sent in found),
        remember=fmean(sent.remember for sent in found),
    )


def _stage_cost(ranks: Sequence[RankCost], switches: Switches) -> StageCost:
    epilogue = _message(ranks, switches, When.GRADIENT)
    return StageCost(
        forward=fmean(_pass_seconds(rank, switches, When.FORWARD_PASS) for rank in ranks),
        backward=fmean(_pass_seconds(rank, switches, When.BACKWARD_PASS) for rank in ranks),
        activation=_message(ranks, switches, When.ACTIVATION),
        gradient=_message(ranks, Switches({}), When.GRADIENT) if switches.epilogue_only else epilogue,
        epilogue=epilogue,
    )


def _left_to_reduce(rank: RankCost, switches: Switches, contention: float) -> float:
    """Return the seconds of a rank's reduction over its replicas that its last backward passes do not hide."""
    sent = _sent(rank, switches, When.AFTER_BACKWARD, Link.REPLICAS)
    first, later = (sum(each.transfer for each in sent), sum(each.second_phase for each in sent))
    window = _pass_seconds(rank, switches, When.BACKWARD_PASS) * rank.last_passes
    left = left_after_backward(first, window, rank.buckets, later)
    return left + contention * (first + later - left)


def last_backward_ends(
    schedule: Schedule,
    costs: Sequence[StageCost],
    observe: Callable[[int, Pass | None, float, float], None] | None = None,
) -> list[float]:
    """Simulate an iteration's passes; return the end of each stage's last backward pass, in seconds.

    A stage sends its messages one after the other, and computes during their transfers.

    Args:
        schedule: the passes of each stage. Raises ValueError if they wait for each other in a circle.
        costs: the costs of each stage.
        observe: called for each pass and message with its stage, pass (None for a message), begin and end.
    """
    stages, last = schedule.stages, schedule.stages * schedule.chunks - 1
    free, link_free = [0.0] * stages, [0.0] * stages
    todo = [deque(schedule.passes(stage)) for stage in range(stages)]
    gradients = [iter(schedule.messages(receiver)) for receiver in range(stages)]
    # Seconds at which a pass's result is with the pass that needs it, by direction, place (chunk * stages + stage) and
    # micro-batch.
    arrived = {(True, -1, work.micro_batch): 0.0 for work in todo[0]}

    def send(stage: int, message: Sent) -> float:
        """Send a message; return the time at which its receiver has decoded it."""
        free[stage] += message.encode
        begin = max(link_free[stage], free[stage])
        link_free[stage] = begin + message.transfer
        if observe:
            observe(stage, None, begin, link_free[stage])
        free[stage] += message.remember
        return link_free[stage] + message.decode

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
        elif work.forward:
            arrived[result] = send(stage, cost.activation)
        elif place > 0:
            arrived[result] = send(stage, cost.epilogue if next(gradients[stage - 1]).epilogue else cost.gradient)
        return True

    while any(todo):
        before = sum(map(len, todo))
        for stage, passes in enumerate(todo):
            while passes and run(stage, passes[0]):
                passes.popleft()
        if sum(map(len, todo)) == before:
            raise ValueError("the schedule's passes wait for each other in a circle: no stage can go on")
    return free


def reduced_after(backward_ends: Sequence[float], reductions: Sequence[float], embedding: float) -> float:
    """Return the seconds from the iteration's beginning until all gradients are reduced.

    Args:
        backward_ends: the result of `last_backward_ends`, by stage.
        reductions: by stage, the seconds of its reduction over the replicas that are left at its `backward_ends`.
        embedding: seconds of the tied embedding's reduction, which starts when the first and the last stage have
            reduced.
    """
    ends = [end + reduction for end, reduction in zip(backward_ends, reductions, strict=True)]
    return max(*ends, max(ends[0], ends[-1]) + embedding)


def left_after_backward(reduction: float, backward: float, buckets: int, later: float = 0.0) -> float:
    """Return the seconds of a stage's reduction that are left when its last backward pass ends.

    All of its `buckets` but the last become complete during that pass; with one bucket, the reduction begins after the
    pass.

    Args:
        reduction: seconds of the first phases of all buckets.
        backward: seconds of the last backward pass.
        later: seconds of their second phases. The second phase of a bucket begins when the next bucket is complete.
    """
    whole, until_the_last = reduction + later, min(2, buckets) * later / buckets
    return max(reduction / buckets + until_the_last, whole - backward * (buckets - 1) / buckets)
