"""What compression leaves out and what it costs, measured in the iterations that are reported and in no other."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from optimus_cc_ext.compressors import Scratch

__all__ = ["Gauge"]


class Gauge:
    """Sums over one iteration of one technique on one rank. Measuring asks the host nothing; reading does.

    Errors are squared Frobenius norms, and relative to what was compressed: the gradient with the residual added.
    """

    def __init__(self, scratch: Scratch | None = None) -> None:
        self.on = False
        """Whether this iteration is measured."""

        self._scratch = scratch or Scratch()
        self._squares: torch.Tensor | None = None
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, on: bool) -> None:
        """An iteration begins, to be measured or not."""
        self.on = on
        if on:
            self._seconds, self._events = 0.0, []
            if self._squares is not None:
                self._squares.zero_()

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count the time that the work inside takes on `device`."""
        if not self.on:
            yield
        elif device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def note_compressed(self, matrix: torch.Tensor) -> None:
        """`matrix` is compressed."""
        if self.on:
            self._add(1, matrix, 1.0)

    def note_error(self, error: torch.Tensor) -> None:
        """What was compressed lost `error`."""
        if self.on:
            self._add(0, error, 1.0)

    def note_projection(self, matrix: torch.Tensor, kept: torch.Tensor) -> None:
        """`matrix` is projected on orthonormal columns, `kept` its coordinates: |error|^2 = |matrix|^2 - |kept|^2."""
        if self.on:
            self._add(slice(0, 2), matrix, 1.0)
            self._add(0, kept, -1.0)

    def squares(self) -> tuple[float, float]:
        """(|error|^2, |what was compressed|^2), from the device."""
        if self._squares is None:
            return 0.0, 0.0
        error, of = self._squares.tolist()
        return max(error, 0.0), of

    def seconds(self) -> float:
        """Time spent on compressing and decompressing; waits for the device."""
        for _, end in self._events:
            end.synchronize()
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1e3

    def _add(self, index: int | slice, tensor: torch.Tensor, sign: float) -> None:
        if self._squares is None:
            self._squares = torch.zeros(2, dtype=torch.float64, device=tensor.device)
        norm = self._scratch.take("norm", (), torch.float64, tensor.device)
        torch.linalg.vector_norm(tensor, dtype=torch.float64, out=norm)
        self._squares[index].addcmul_(norm, norm, value=sign)
