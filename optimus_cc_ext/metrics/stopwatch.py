"""A stopwatch for work on a device. Measuring never waits for the device; reading the times does."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Durations of one process, by name."""

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    @contextmanager
    def timed(self, name: str, device: torch.device) -> Iterator[None]:
        """Record the time that the work inside the context takes on `device`, if the stopwatch is on."""
        if not self.on:
            yield
        elif device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events[name].append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds[name].append(time.perf_counter() - began)

    def total(self, name: str) -> float:
        """Return the sum of all durations in seconds; waits for the device."""
        return sum(self._read(name))

    def clear(self) -> None:
        self._seconds.clear()
        self._events.clear()

    def _read(self, name: str) -> list[float]:
        for start, end in self._events.pop(name, ()):
            end.synchronize()
            self._seconds[name].append(start.elapsed_time(end) / 1e3)
        return self._seconds[name]
