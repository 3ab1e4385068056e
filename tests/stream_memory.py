"""Memory that pretended streams use: which accesses of a byte have no order, and what is freed too early."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Access", "Memory", "Place", "Report"]

MOST_FAULTS = 40


@dataclass
class Report:
    """Findings of one rank, which can be sent to another process."""

    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    scratch: list[tuple[str, ...]] = field(default_factory=list)
    """Names of the streams on which each `Scratch` was used, in the order of their first use."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    """Modelled microseconds at the end of each step: with many queues, and with one."""


@dataclass(slots=True)
class Access:
    """Access of the bytes `first` to `end` of a storage, by launch number `at` of a stream."""

    first: int
    end: int
    stream: Any
    at: int
    writes: bool
    place: Place

    def before(self, stream: Any) -> bool:
        """Return whether the next launch of `stream` comes after this access."""
        return stream is self.stream or stream.clock.get(self.stream, 0) >= self.at

    def __str__(self) -> str:
        return f"{self.stream.name} {'writes' if self.writes else 'reads'} ({self.place})"


@dataclass(slots=True)
class _Shadow:
    """Accesses of a storage with which a later access may race."""

    storage: StorageWeakRef
    owner: Any
    accesses: list[Access] = field(default_factory=list)
    shared: bool = False


class Place:
    """An operator and the three innermost lines of ours or of Megatron's that called it, as text only if asked for."""

    __slots__ = ("lines", "name")

    def __init__(self, name: str) -> None:
        self.name, self.lines = name, list(itertools.islice(_callers(), 3))

    @property
    def of_compressor(self) -> bool:
        return bool(self.lines) and "optimus_cc_ext/compressors/" in self.lines[0][0]

    def __str__(self) -> str:
        return self.name + "".join(f" < {'/'.join(file.split('/')[-2:])}:{line}" for file, line in self.lines)


def _callers() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "optimus_cc_ext/" in file or "/megatron/core/" in file or "/megatron/training/" in file:
            yield file, frame.f_lineno
        frame = frame.f_back


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage between which a tensor lies."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


class Memory:
    """Memory accesses, by storage, that a later access may race with."""

    def __init__(self) -> None:
        self.report = Report()
        self._shadows: dict[int, _Shadow] = {}
        self._freed: list[tuple[Any, list[Access]]] = []
        """The accesses, by other streams, of storages that were freed since their owner last allocated memory."""

    def fault(self, kind: str, text: str) -> None:
        """Count a fault, and keep its text if it is one of the first."""
        self.report.counts[kind] += 1
        if len(self.report.faults) < MOST_FAULTS and text not in self.report.faults:
            self.report.faults.append(text)

    def collect(self) -> None:
        """Note the storages of several streams that were freed since the last call."""
        for key in [key for key, shadow in self._shadows.items() if shadow.shared and shadow.storage.expired()]:
            self.forget(self._shadows.pop(key))

    def leave(self, storage: torch.UntypedStorage) -> None:
        """Free the memory of a storage that lives on in other memory."""
        self.forget(self._shadows.pop(storage._cdata))

    def forget(self, shadow: _Shadow) -> None:
        """Give the memory of a storage back to the stream on which it was allocated."""
        owner = shadow.owner
        self._freed.append((owner, [access for access in shadow.accesses if access.stream is not owner]))

    def allocates(self, stream: Any) -> None:
        """Check that this stream has waited for all uses of the memory that it may get back."""
        for owner, accesses in self._freed:
            late = next((use for use in accesses if owner is stream and not use.before(stream)), None)
            if late is not None:
                self.fault("reused", f"{stream.name} REUSES memory while {late.stream.name} may still use it: {late}")
        self._freed = [(owner, accesses) for owner, accesses in self._freed if owner is not stream]

    def touch(self, tensors: Sequence[Any], place: Place, stream: Any, at: int, *, writes: bool) -> None:
        """Note that launch number `at` of a stream reads or writes these tensors."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not tensor.is_sparse:
                storage, (first, end) = tensor.untyped_storage(), _span(tensor)
                if end > first:
                    self.note(storage, Access(first, end, stream, at, writes, place))

    def note(self, storage: torch.UntypedStorage, new: Access) -> None:
        """Note an access; it is a race if it has no order with an earlier one of the same bytes, and one writes."""
        shadow = self._shadows.get(storage._cdata)
        if shadow is not None and shadow.storage.expired():
            self.forget(shadow)
            shadow = None
        if shadow is None:
            shadow = self._shadows[storage._cdata] = _Shadow(StorageWeakRef(storage), new.stream)
        shadow.shared |= new.stream is not shadow.owner
        kept = []
        for old in shadow.accesses:
            ordered = old.before(new.stream)
            if not ordered and (new.writes or old.writes) and old.first < new.end and new.first < old.end:
                self.fault("races", f"RACE: {new} does not wait for {old}")
            inside = new.first <= old.first and old.end <= new.end
            if not (ordered and inside and (new.writes or (not old.writes and old.stream is new.stream))):
                kept.append(old)
        shadow.accesses = [*kept[-400:], new]
