"""Streams and events of a device that does everything at once: the order holds by itself, times are real."""

from __future__ import annotations

import time
from typing import Any

import torch

from optimus_cc_ext.cpu_runtime.patching import Patches
from optimus_cc_ext.cpu_runtime.refusals import NoCpuMeaningError

__all__ = ["HostEvent", "HostStream", "install"]


class HostEvent:
    """Stands in for ``torch.cuda.Event``: recorded work is finished by the time that ``record`` is called."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NoCpuMeaningError("torch.cuda.Event(interprocess=True)")
        self._timed = enable_timing
        self._seconds: float | None = None

    def record(self, stream: HostStream | None = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: HostStream | None = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises ValueError, as on a GPU, unless both were created with ``enable_timing=True`` and recorded.
        """
        if not (self._timed and end_event._timed):
            raise ValueError("both events must be created with enable_timing=True to measure an elapsed time")
        if self._seconds is None or end_event._seconds is None:
            raise ValueError("both events must be recorded before an elapsed time can be measured")
        return (end_event._seconds - self._seconds) * 1e3


class HostStream:
    """Stands in for ``torch.cuda.Stream``: every stream is the program's own order, so all are equal."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, stream: HostStream) -> None:
        return None

    def wait_event(self, event: HostEvent) -> None:
        return None

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event if event is not None else HostEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostStream)

    def __hash__(self) -> int:
        return hash(HostStream)


class HostStreamContext:
    """Stands in for ``torch.cuda.StreamContext`` and ``torch.cuda.stream``; None is allowed, as on a GPU."""

    def __init__(self, stream: HostStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        return None


def _stream_of(device: Any = None) -> HostStream:
    return HostStream()


def _set_stream(stream: HostStream | None) -> None:
    return None


def install(patches: Patches) -> None:
    """Replace torch.cuda's streams and events."""
    replacements: dict[str, Any] = {
        "Stream": HostStream,
        "Event": HostEvent,
        "StreamContext": HostStreamContext,
        "stream": HostStreamContext,
        "set_stream": _set_stream,
        "current_stream": _stream_of,
        "default_stream": _stream_of,
        "is_current_stream_capturing": lambda: False,
    }
    for name, replacement in replacements.items():
        patches.replace(torch.cuda, name, replacement)
        for module in (torch.cuda.streams, torch.cuda.graphs):
            if name in vars(module):
                patches.replace(module, name, replacement)
