"""Measurement of compression errors and compression time, only in the iterations that are reported."""

from contextlib import AbstractContextManager
from math import gcd

import torch

from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.metrics.stopwatch import Stopwatch


def norm(tensor: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Return the Frobenius norm of `tensor`, 0-dim fp64, in scratch memory.

    The norm of each row is taken in fp32, and the norm of the norms of all rows in fp64.
    Summing everything in fp64 would copy the tensor, at 8 bytes a value. In fp32 the sum of a long row drifts, by 4e-4
    at 1e7 values on a CPU, so flat tensors are split into rows.
    """
    if tensor.dim() == 1:
        tensor = tensor.view(-1, gcd(tensor.numel(), 4096))
    rows = torch.linalg.vector_norm(
        tensor, dim=-1, dtype=torch.float32,
        out=scratch.take("row norms", tensor.shape[:-1], torch.float32, tensor.device),
    )  # fmt: skip
    wide = scratch.take("row norms", rows.shape, torch.float64, rows.device).copy_(rows)
    return torch.linalg.vector_norm(wide, out=scratch.take("norm", (), torch.float64, wide.device))


class Gauge:
    """Sums of one technique on one rank over one iteration. Measuring does not wait for the device; reading does.

    Errors are squared Frobenius norms. They are relative to the compressed tensor, which is the gradient with the
    residual added.
    """

    def __init__(self, scratch: Scratch | None = None) -> None:
        self.on = False
        """True if this iteration is measured."""

        self._scratch = scratch or Scratch()
        self._squares: torch.Tensor | None = None
        self._stopwatch = Stopwatch()

    def begin(self, on: bool) -> None:
        """Begin an iteration, which is measured if `on` is true."""
        self.on = self._stopwatch.on = on
        if on:
            self._stopwatch.clear()
            if self._squares is not None:
                self._squares.zero_()

    def timed(self, device: torch.device) -> AbstractContextManager[None]:
        """Count the time that the work inside the context takes on `device`."""
        return self._stopwatch.timed("compression", device)

    def note_compressed(self, matrix: torch.Tensor) -> None:
        """Add the norm of `matrix`, which is about to be compressed."""
        if self.on:
            self._add(1, matrix, 1.0)

    def note_error(self, error: torch.Tensor) -> None:
        if self.on:
            self._add(0, error, 1.0)

    def note(self, values: torch.Tensor, error: torch.Tensor, scratch: Scratch | None = None) -> None:
        """Add the norms of `values`, which were compressed, and of their compression error.

        Args:
            scratch: memory of the stream that measures; None: the gauge's own.
        """
        if self.on:
            self._add(1, values, 1.0, scratch)
            self._add(0, error, 1.0, scratch)

    def note_projection(self, matrix: torch.Tensor, kept: torch.Tensor) -> None:
        """Add the norm of `matrix` and the error of its projection onto orthonormal columns, |matrix|^2 - |kept|^2,
        where `kept` holds its coordinates.
        """
        if self.on:
            self._add(slice(0, 2), matrix, 1.0)
            self._add(0, kept, -1.0)

    def squares(self) -> tuple[float, float]:
        """Return (|error|^2, |compressed tensor|^2); waits for the device."""
        if self._squares is None:
            return 0.0, 0.0
        error, compressed = self._squares.tolist()
        return max(error, 0.0), compressed

    def seconds(self) -> float:
        """Return the seconds spent on compressing and decompressing; waits for the device."""
        return self._stopwatch.total("compression")

    def _add(self, index: int | slice, tensor: torch.Tensor, sign: float, scratch: Scratch | None = None) -> None:
        if self._squares is None:
            self._squares = torch.zeros(2, dtype=torch.float64, device=tensor.device)
        length = norm(tensor, scratch or self._scratch)
        self._squares[index].addcmul_(length, length, value=sign)
