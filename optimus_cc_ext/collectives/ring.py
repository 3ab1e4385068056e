"""Ring of message buffers, which all exchanges of gradients and parameters on a rank take in turn.

An exchange sends its messages in slices. A slice holds a slot of the ring from the encoding of its messages until they
are decoded. Where no slot is free, slices wait in a queue on the host, in the order in which they were submitted, and
whatever gives a slot back begins the next one: so a slice is encoded while the one before is under way. All ranks of a
group submit and end the same slices in the same order.

On a GPU the host never waits: a slice works on the stream on which it was submitted, and a slot that is taken again
waits, in stream order, for the work that used it last.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from optimus_cc_ext.slots import SLOTS, Exchanged, slots_bytes


def has_streams(device: torch.device) -> bool:
    """Return whether work on a device is ordered by streams, for which the host does not wait."""
    return device.type == "cuda"


class Slice(ABC):
    """Slice of an exchange, whose messages hold a slot.

    Args:
        nbytes: bytes of memory for the messages.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self.pending = False
        """True from `Lane.submit` until the messages are decoded."""

        self.views: dict[torch.Tensor, tuple[torch.Tensor, ...]] = {}
        """Views of each slot's memory that this slice has used, by that memory. They are kept because making a view
        costs as much as a small kernel.
        """

        self.tables = dict[object, int]()
        """Bytes of the kernels' tables by layout; slices share the tables of a layout."""

        self._stream: torch.cuda.Stream | None = None

    def views_of(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `cut` of a slot's memory, flat uint8 of at least `nbytes` bytes with any content."""
        if memory not in self.views:
            self.views[memory] = self.cut(memory)
        return self.views[memory]

    @abstractmethod
    def cut(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the views of a slot's memory that `begin` gets."""

    @abstractmethod
    def begin(self, *views: torch.Tensor) -> None:
        """Encode messages into a slot's memory, and send them."""

    @abstractmethod
    def end(self) -> None:
        """Wait for the messages, and decode them; afterwards the memory belongs to another slice."""

    def take_stream(self) -> None:
        """Bind the slice to the current stream, on which all of its work will run."""
        self._stream = torch.cuda.current_stream(self.device) if has_streams(self.device) else None

    def on_its_stream(self) -> AbstractContextManager[object]:
        """Return a context in which the slice's stream is the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let later work on the current stream see the result."""
        if self._stream is not None and self._stream != (current := torch.cuda.current_stream(self.device)):
            current.wait_stream(self._stream)


class Ring:
    """Message buffers of one rank.

    Args:
        slots: number of slots, each as large as the largest slice.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._lanes: list[Lane] = []
        self._largest = 0
        """Bytes of a slot: those of the largest slice of all lanes."""

        self._free: deque[_Slot] = deque()
        self._under_way: deque[tuple[Slice, _Slot]] = deque()
        self._waiting: deque[Slice] = deque()

    def lane(self, *, urgent: bool = False) -> "Lane":
        """Make a lane for exchanges of one kind; `Lane` has the argument."""
        self._lanes.append(Lane(self, urgent))
        return self._lanes[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that all lanes together use, as slices of two kinds are never under way together, and of
        the kernels' tables.
        """
        tables = dict[object, int]()
        for lane in self._lanes:
            tables |= lane.tables
        return slots_bytes((lane.exchanges for lane in self._lanes), self._slots) + sum(tables.values())

    def measure(self) -> None:
        """Make slots as large as the lanes now need them."""
        before, self._largest = self._largest, slots_bytes((lane.exchanges for lane in self._lanes), 1)
        if self._largest != before:
            self.drop_memory()

    def drop_memory(self) -> None:
        """Drop the free slots; later ones are made when they are needed."""
        if any(has_streams(slot.device) for slot in self._free):
            torch.cuda.synchronize()  # a slot returns to the current stream, while another one may still use it
        self._free.clear()
        for lane in self._lanes:
            lane.forget_views()

    def submit(self, slices: Sequence[Slice], *, urgent: bool) -> None:
        """Begin slices, or let them wait for slots; `urgent` is that of their lane."""
        earlier = len(self._under_way)
        for each in slices:
            each.pending = True
            each.take_stream()
        self._waiting.extend(slices)
        self._begin()
        for _ in range(earlier if urgent else 0):
            if self._waiting:
                self._end_oldest()

    def end(self, slices: Sequence[Slice]) -> None:
        """End these slices, and with them every earlier one. Later work on the current stream sees the results."""
        for each in slices:
            while each.pending:
                self._end_oldest()
        for each in slices[-1:]:
            each.join()

    def forget(self, slices: Sequence[Slice]) -> None:
        """Drop slices that a failed pass has left. Messages may still arrive in their slots, which are not used
        again.
        """
        for each in slices:
            each.pending = False
        self._waiting = deque(each for each in self._waiting if each.pending)
        self._under_way = deque(each for each in self._under_way if each[0].pending)

    def _begin(self) -> None:
        while self._waiting and len(self._under_way) < self._slots:
            begun = self._waiting.popleft()
            with begun.on_its_stream():
                slot = self._free.popleft() if self._free else _Slot(self._largest, begun.device)
                begun.begin(*begun.views_of(slot.take()))
            self._under_way.append((begun, slot))

    def _end_oldest(self) -> None:
        ended, slot = self._under_way.popleft()
        with ended.on_its_stream():
            ended.end()
            slot.give_back()
        ended.pending = False
        if slot.nbytes == self._largest:
            self._free.append(slot)
        self._begin()


@dataclass(frozen=True, eq=False)
class Lane:
    """Exchanges of one kind, which share a ring with those of other kinds."""

    ring: Ring
    urgent: bool = False
    """True if a new exchange ends earlier ones whose slots it needs; otherwise it waits until these are ended."""

    _exchanges: list[tuple[Sequence[Slice], bool]] = field(default_factory=list)

    def reserve(self, slices: Sequence[Slice], *, together: bool) -> None:
        """Note the slices of one more exchange, which will be submitted together; `Exchanged` has `together`."""
        self._exchanges.append((slices, together))
        self.ring.measure()

    def keep(self, exchanges: Sequence[Sequence[Slice]]) -> None:
        """Forget all exchanges but these: they submit nothing any more, and the memory that they alone needed goes."""
        self.forget()
        self._exchanges[:] = [each for each in self._exchanges if any(each[0] is kept for kept in exchanges)]
        self.ring.measure()
        self.ring.drop_memory()

    def forget_views(self) -> None:
        """Forget the views of slots, which keep their memory."""
        for slices, _ in self._exchanges:
            for each in slices:
                each.views.clear()

    @property
    def tables(self) -> dict[object, int]:
        """Bytes of the kernels' tables by layout."""
        return {key: nbytes for slices, _ in self._exchanges for each in slices for key, nbytes in each.tables.items()}

    @property
    def exchanges(self) -> list[Exchanged]:
        """The bytes of all exchanges of the lane."""
        return [Exchanged([each.nbytes for each in found], together) for found, together in self._exchanges]

    def submit(self, slices: Sequence[Slice]) -> None:
        """Begin the slices of one exchange, or let them wait for slots."""
        self.ring.submit(slices, urgent=self.urgent)

    def end(self, slices: Sequence[Slice]) -> None:
        """End these slices, and with them every earlier one; see `Ring.end`."""
        self.ring.end(slices)

    def forget(self) -> None:
        """Drop what a failed pass has left under way."""
        left = [each for slices, _ in self._exchanges for each in slices if each.pending]
        if left:
            self.ring.forget(left)


class _Slot:
    """One message buffer, used by one slice after the other."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._used = torch.cuda.Event() if has_streams(device) else None

    def take(self) -> torch.Tensor:
        """Return the memory, and let the current stream wait for the work that used the memory last."""
        if self._used is not None:
            self._used.wait()
        return self._memory

    def give_back(self) -> None:
        """Mark the end, on the current stream, of the work that uses the memory."""
        if self._used is not None:
            self._used.record()
