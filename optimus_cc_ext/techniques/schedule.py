"""Order of passes and gradient messages in one iteration, for both of Megatron's 1F1B schedules.

Both ends of a link derive the same list from the same numbers, so that they agree on every message without
communication. A message belongs to the epilogue if it arrives in the *receiver's* cooldown: the receiver then has no
forward pass left whose computation could hide the transfer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """Activation gradient that a stage sends to the stage before it."""

    chunk: int
    """Model chunk of the receiver whose output the gradient belongs to; 0 without interleaving."""

    epilogue: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """Forward or backward pass of one micro-batch through one model chunk of a stage."""

    forward: bool
    chunk: int
    micro_batch: int


class Schedule(Protocol):
    """Order of the passes of one iteration on all stages."""

    @property
    def stages(self) -> int: ...

    @property
    def chunks(self) -> int:
        """Number of model chunks per stage."""
        ...

    def passes(self, stage: int) -> Sequence[Pass]:
        """Return the passes of `stage`, in the order in which it computes them."""
        ...

    def messages(self, receiving_stage: int) -> Sequence[Message]:
        """Return the messages that `receiving_stage` gets from the next stage, in the order of sending and
        receiving.
        """
        ...


def is_epilogue(stages: int, micro_batches: int, sending_stage: int, message: int) -> bool:
    """Return whether a gradient message of non-interleaved 1F1B arrives in the receiver's cooldown.

    The cooldown is as long as the warm-up: min(stages - 1 - receiving stage, micro_batches) messages, and the receiving
    stage is the one before the sending stage.

    Args:
        stages: number of pipeline stages.
        micro_batches: number of micro-batches of this iteration.
        sending_stage: stage s >= 1 that sends the gradient to s - 1.
        message: index of the message on that link, from 0 to micro_batches - 1.
    """
    return message >= micro_batches - min(stages - sending_stage, micro_batches)


@dataclass(frozen=True)
class NonInterleaved:
    """1F1B with one model chunk per stage: one message per micro-batch and link, in the order of the micro-batches."""

    stages: int
    micro_batches: int
    chunks: int = 1

    def passes(self, stage: int) -> tuple[Pass, ...]:
        """Return the passes of `stage`: warm-up, one forward and one backward by turns, cooldown."""
        warmups = min(self.stages - 1 - stage, self.micro_batches)
        return tuple(_one_forward_one_backward((0,) * self.micro_batches, (0,) * self.micro_batches, warmups))

    def messages(self, receiving_stage: int) -> tuple[Message, ...]:
        """Return the messages to `receiving_stage`, one for each micro-batch."""
        return tuple(
            Message(0, is_epilogue(self.stages, self.micro_batches, receiving_stage + 1, message))
            for message in range(self.micro_batches)
        )


@dataclass(frozen=True)
class Interleaved:
    """Interleaved 1F1B: `chunks` model chunks per stage, and a wrap link from stage 0 back to the last stage.

    Every stage runs its backward passes in the same order of (micro-batch, chunk). A pass of the last stage's last
    chunk starts from the loss and receives nothing; every other pass receives one message.
    """

    stages: int
    chunks: int
    forward_order: tuple[int, ...]
    """Model chunk of each forward pass, from Megatron's `get_schedule_table`."""

    warmups: tuple[int, ...]
    """Number of forward passes before the first backward pass, by stage, as Megatron computes it."""

    def passes(self, stage: int) -> tuple[Pass, ...]:
        """Return the passes of `stage`: warm-up, one forward and one backward by turns, cooldown."""
        return tuple(_one_forward_one_backward(self.forward_order, self.backward_order(), self.warmups[stage]))

    def messages(self, receiving_stage: int) -> tuple[Message, ...]:
        """Return the messages to `receiving_stage`, one for each of its backward passes that does not start from
        the loss.
        """
        steady_ends = len(self.forward_order) - self.warmups[receiving_stage]
        from_the_loss = self.chunks - 1 if receiving_stage == self.stages - 1 else None
        return tuple(
            Message(chunk, epilogue=backward >= steady_ends)
            for backward, chunk in enumerate(self.backward_order())
            if chunk != from_the_loss
        )

    def backward_order(self) -> tuple[int, ...]:
        """Return the model chunk of each backward pass: the forward order, from the last chunk to the first."""
        return tuple(self.chunks - 1 - chunk for chunk in self.forward_order)


def _one_forward_one_backward(forward: Sequence[int], backward: Sequence[int], warmups: int) -> Iterator[Pass]:
    """Yield `warmups` forward passes, then a forward and a backward pass by turns, then the remaining backward passes.

    Args:
        forward: the model chunk of each forward pass; a chunk takes its micro-batches in their order.
        backward: the model chunk of each backward pass.
        warmups: number of forward passes at the beginning.
    """
    forwards, backwards = _numbered(forward, forward=True), _numbered(backward, forward=False)
    for _ in range(warmups):
        yield next(forwards)
    for following in forwards:
        yield following
        yield next(backwards)
    yield from backwards


def _numbered(chunks: Sequence[int], *, forward: bool) -> Iterator[Pass]:
    seen: Counter[int] = Counter()
    for chunk in chunks:
        yield Pass(forward, chunk, seen[chunk])
        seen[chunk] += 1
