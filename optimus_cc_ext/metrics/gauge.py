"""What compression leaves out and what it costs, measured in the iterations that are reported and in no other."""

from contextlib import AbstractContextManager
from math import gcd

import torch

from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.metrics.stopwatch import Stopwatch

__all__ = ["Gauge", "norm"]


def norm(tensor: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """The Frobenius norm, 0-dim fp64, in scratch memory: of each row in fp32, of the rows' norms in fp64.

    To take it in fp64 at once would copy the tensor: 8 bytes a value. In fp32 a long row's sum drifts, by 4e-4 at 1e7
    values on a CPU, so flat tensors are taken in rows.
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
    """Sums over one iteration of one technique on one rank. Measuring asks the host nothing; reading does.

    Errors are squared Frobenius norms, and relative to what was compressed: the gradient with the residual added.
    """

    def __init__(self, scratch: Scratch | None = None) -> None:
        self.on = False
        """Whether this iteration is measured."""

        self._scratch = scratch or Scratch()
        self._squares: torch.Tensor | None = None
        self._stopwatch = Stopwatch()

    def begin(self, on: bool) -> None:
        """An iteration begins, to be measured or not."""
        self.on = self._stopwatch.on = on
        if on:
            self._stopwatch.clear()
            if self._squares is not None:
                self._squares.zero_()

    def timed(self, device: torch.device) -> AbstractContextManager[None]:
        """Count the time that the work inside takes on `device`."""
        return self._stopwatch.timed("compression", device)

    def note_compressed(self, matrix: torch.Tensor) -> None:
        """`matrix` is compressed."""
        if self.on:
            self._add(1, matrix, 1.0)

    def note_error(self, error: torch.Tensor) -> None:
        """What was compressed lost `error`."""
        if self.on:
            self._add(0, error, 1.0)

    def note(self, values: torch.Tensor, error: torch.Tensor) -> None:
        """`values` were compressed, and lost `error`."""
        self.note_compressed(values)
        self.note_error(error)

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
        return self._stopwatch.total("compression")

    def _add(self, index: int | slice, tensor: torch.Tensor, sign: float) -> None:
        if self._squares is None:
            self._squares = torch.zeros(2, dtype=torch.float64, device=tensor.device)
        length = norm(tensor, self._scratch)
        self._squares[index].addcmul_(length, length, value=sign)
