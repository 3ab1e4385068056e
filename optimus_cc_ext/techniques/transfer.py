"""Transfer of one tensor in a point-to-point call, with the work around it, and buffers for messages in flight."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tensor that is sent or received, with the work that has to be done around the transfer."""

    tensor: torch.Tensor
    """Tensor that is posted: the original tensor, or a compressed message in its place."""

    after_post: Callable[[], None] = _nothing
    """Work to be called once all of the call's tensors are posted, before any is waited for, so that the transfer hides
    it.
    """

    after_wait: Callable[[], None] = _nothing
    """Work to be called once the transfer has finished: decompresses the message that arrived, returns buffers."""

    park: Callable[[Callable[[], None]], None] | None = None
    """Takes over the wait for a message that is sent from a buffer of ours, in place of `after_wait`. Its argument is a
    function that waits for the transfer, and is called when the buffer is needed again or the iteration ends. None: the
    caller has to wait, because the transfer writes the tensor, or because the tensor's owner may free it after the
    wait.
    """

    def then(self, after_wait: Callable[[], None]) -> "Transfer":
        """Return this transfer with `after_wait` called after the transfer's own `after_wait`."""

        def both() -> None:
            self.after_wait()
            after_wait()

        return replace(self, after_wait=both)


class Recent[K, V]:
    """The values that were used last, at most `most`, by key. One more takes the place of the one not used longest."""

    def __init__(self, most: int) -> None:
        self._most, self._values = most, dict[K, V]()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`, made if it is not there."""
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value
        if len(self._values) > self._most:
            del self._values[next(iter(self._values))]
        return value

    def values(self) -> Iterable[V]:
        """Return the values, the one not used longest first."""
        return self._values.values()


class MessageBuffers:
    """Flat buffers for messages. A buffer is allocated only while more of its size are in flight than ever before.

    The first `MOST_SIZES` lengths have buffers of their own size. If there are more (variable sequence lengths), each
    further one uses the first part of a buffer whose size is a power of two, so that memory stays bounded.

    A buffer whose message is being sent is parked together with the wait for it. At most `MOST_PARKED` buffers of one
    size are parked: the next message then waits for the oldest of them. This follows from the order of the messages
    alone, never from the speed of their transfers, so that an iteration needs no more buffers than the one before it.
    """

    MOST_PARKED = 4
    """Largest number of messages of one size that are in flight at once. The compute stream waits if there would be
    more: the link has then been slower than the computation for so long that one more buffer would only delay the wait.
    """

    MOST_SIZES = 4
    """Number of lengths that get buffers of exactly their size: those of a run whose messages do not vary."""

    def __init__(self) -> None:
        self._sizes: set[int] = set()
        self._whole: dict[int, torch.Tensor] = {}
        """All buffers, by address, which is also that of their first part."""

        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._parked: dict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, Callable[[], None]]]] = defaultdict(deque)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Take a free buffer; it still contains an older message."""
        size = self._size(numel)
        key = size, dtype
        if not self._free[key] and len(self._parked[key]) == self.MOST_PARKED:
            self._wait_for_the_oldest(key)
        if self._free[key]:
            return self._free[key].pop()[:numel]
        buffer = torch.empty(size, dtype=dtype, device=device)
        self._whole[buffer.data_ptr()] = buffer
        return buffer[:numel]

    def _size(self, numel: int) -> int:
        """Return the size of the buffers for messages of this length."""
        if len(self._sizes) < self.MOST_SIZES:
            self._sizes.add(numel)
        return numel if numel in self._sizes else 1 << (numel - 1).bit_length()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._whole.values())

    def sending(self, message: torch.Tensor) -> Transfer:
        """Make the transfer that sends `message`, which lies in one of these buffers, and returns the buffer."""
        return Transfer(message, after_wait=partial(self.give_back, message), park=partial(self.park, message))

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return the buffer of a completed transfer."""
        whole = self._whole[buffer.data_ptr()]
        self._free[whole.numel(), whole.dtype].append(whole)

    def park(self, buffer: torch.Tensor, wait: Callable[[], None]) -> None:
        """Return the buffer of a message that is being sent; `wait` waits until the message has left."""
        whole = self._whole[buffer.data_ptr()]
        self._parked[whole.numel(), whole.dtype].append((whole, wait))

    def settle(self) -> None:
        """Wait for all messages that are being sent. Raises the errors of the transfers."""
        for key, parked in self._parked.items():
            while parked:
                self._wait_for_the_oldest(key)

    def _wait_for_the_oldest(self, key: tuple[int, torch.dtype]) -> None:
        buffer, wait = self._parked[key].popleft()
        wait()
        self._free[key].append(buffer)
