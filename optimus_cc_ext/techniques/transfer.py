"""The transfer of one tensor in a point-to-point call, what is done around it, and buffers for what is in flight."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

__all__ = ["MessageBuffers", "Transfer"]


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor that is sent or received, and what is done around that."""

    tensor: torch.Tensor
    """What is posted: the tensor itself, or a compressed message in its place."""

    after_post: Callable[[], None] = _nothing
    """To be called once all of the call's tensors are posted, before any is waited for: work that the wire hides."""

    after_wait: Callable[[], None] = _nothing
    """To be called once the transfer has finished: decompresses what arrived, gives buffers back."""

    park: Callable[[Callable[[], None]], None] | None = None
    """Takes over the wait for a message that is sent from a buffer of ours, in place of `after_wait`: the function that
    is passed waits for the transfer, and is called when the buffer is needed again or the iteration ends. None: the
    caller has to wait, because the tensor is written by the transfer, or its owner may free it after the wait."""

    def then(self, after_wait: Callable[[], None]) -> "Transfer":
        """Return the same transfer with `after_wait` behind its own."""

        def both() -> None:
            self.after_wait()
            after_wait()

        return replace(self, after_wait=both)


class MessageBuffers:
    """Flat buffers for messages; one is made only while more of its size are in flight than ever before.

    A buffer whose message is being sent is parked together with the wait for it. At most `MOST_PARKED` of one size
    are: the next message then waits for the oldest of them. That follows from the order of the messages alone, never
    from how fast they travel, so that an iteration needs no more buffers than the one before it.
    """

    MOST_PARKED = 4
    """Messages of one size that may be on their way at once. The compute stream waits where more would be: the link
    is then slower than the computation for so long that one more buffer would only put the wait off."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._parked: dict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, Callable[[], None]]]] = defaultdict(deque)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Take a buffer that nobody else has; its content is what the last message left."""
        key = numel, dtype
        if not self._free[key] and len(self._parked[key]) == self.MOST_PARKED:
            self._wait_for_the_oldest(key)
        free = self._free[key]
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def sending(self, message: torch.Tensor) -> Transfer:
        """Make the transfer that sends `message`, which lies in one of these buffers, and returns the buffer."""
        return Transfer(message, after_wait=partial(self.give_back, message), park=partial(self.park, message))

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return the buffer of a message that has arrived or left."""
        self._free[buffer.numel(), buffer.dtype].append(buffer)

    def park(self, buffer: torch.Tensor, wait: Callable[[], None]) -> None:
        """Return the buffer of a message that is being sent. `wait` waits until it has left."""
        self._parked[buffer.numel(), buffer.dtype].append((buffer, wait))

    def settle(self) -> None:
        """Wait for all messages that are being sent. Raises what their waits raise."""
        for key, parked in self._parked.items():
            while parked:
                self._wait_for_the_oldest(key)

    def _wait_for_the_oldest(self, key: tuple[int, torch.dtype]) -> None:
        buffer, wait = self._parked[key].popleft()
        wait()
        self._free[key].append(buffer)
