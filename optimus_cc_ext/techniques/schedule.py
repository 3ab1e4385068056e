"""Which gradient messages pass over a link in one iteration, in order, for both of Megatron's 1F1B schedules.

Both ends of a link derive the same list from the same numbers, so that they agree on every message without asking
each other. A message belongs to the epilogue if it arrives in the *receiver's* cooldown: the receiver then has no
forward pass left whose computation could hide the transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Interleaved", "Message", "NonInterleaved", "Schedule", "is_epilogue"]


@dataclass(frozen=True, slots=True)
class Message:
    """One activation gradient on its way from a stage to the one before it."""

    chunk: int
    """Model chunk of the receiver whose output it is the gradient of; 0 without interleaving."""

    epilogue: bool


class Schedule(Protocol):
    """An iteration's schedule, as far as gradients between stages go."""

    def messages(self, receiving_stage: int) -> Sequence[Message]:
        """What the stage `receiving_stage` receives from the next one, in the order of sending and receiving."""
        ...


def is_epilogue(stages: int, micro_batches: int, sending_stage: int, message: int) -> bool:
    """Whether a gradient message of non-interleaved 1F1B falls into the receiver's cooldown.

    The cooldown is as long as the warm-up: min(stages - 1 - receiving stage, micro_batches) messages, and the receiving
    stage is the one before the sending stage.

    Args:
        stages: pipeline stages P.
        micro_batches: M of this iteration.
        sending_stage: stage s >= 1 that sends the gradient to s - 1.
        message: index 0 .. M - 1 of the message on that link.
    """
    return message >= micro_batches - min(stages - sending_stage, micro_batches)


@dataclass(frozen=True)
class NonInterleaved:
    """1F1B with one model chunk a stage: one message per micro-batch and link, in their order."""

    stages: int
    micro_batches: int

    def messages(self, receiving_stage: int) -> tuple[Message, ...]:
        """See `Schedule.messages`."""
        return tuple(
            Message(0, is_epilogue(self.stages, self.micro_batches, receiving_stage + 1, message))
            for message in range(self.micro_batches)
        )


@dataclass(frozen=True)
class Interleaved:
    """Interleaved 1F1B: `chunks` model chunks a stage, and a wrap link from stage 0 back to the last stage.

    Every stage runs its backward passes in the same order of (micro-batch, chunk). A pass of the last stage's last
    chunk starts from the loss and receives nothing; every other pass receives one message.
    """

    stages: int
    chunks: int
    forward_order: tuple[int, ...]
    """The model chunk of each forward pass, from Megatron's `get_schedule_table`."""

    warmups: tuple[int, ...]
    """Forward passes before the first backward pass, by stage: the numbers that Megatron computes."""

    def messages(self, receiving_stage: int) -> tuple[Message, ...]:
        """See `Schedule.messages`."""
        steady_ends = len(self.forward_order) - self.warmups[receiving_stage]
        from_the_loss = self.chunks - 1 if receiving_stage == self.stages - 1 else None
        return tuple(
            Message(chunk, epilogue=backward >= steady_ends)
            for backward, chunk in enumerate(self.backward_order())
            if chunk != from_the_loss
        )

    def backward_order(self) -> tuple[int, ...]:
        """The model chunk of each backward pass: the forward order, from the last chunk to the first."""
        return tuple(self.chunks - 1 - chunk for chunk in self.forward_order)
