"""Times of pieces of work on the device that does them; reading them is what waits for it, measuring never does."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Durations by name, of one process."""

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    @contextmanager
    def timed(self, name: str, device: torch.device) -> Iterator[None]:
        """Note how long the work inside takes on `device`, if the stopwatch is on."""
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

    def median(self, name: str) -> float:
        """Seconds, 0 where nothing was noted; waits for the device. The first time of many, a warm-up, has no say."""
        noted = self._read(name)
        return statistics.median(noted) if noted else 0.0

    def total(self, name: str) -> float:
        """Seconds of all together; waits for the device."""
        return sum(self._read(name))

    def clear(self) -> None:
        """Forget all times."""
        self._seconds.clear()
        self._events.clear()

    def _read(self, name: str) -> list[float]:
        for start, end in self._events.pop(name, ()):
            end.synchronize()
            self._seconds[name].append(start.elapsed_time(end) / 1e3)
        return self._seconds[name]
