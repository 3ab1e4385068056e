"""Tensors that remember, but only what counted: the law "state follows the step"."""

import torch

from optimus_cc_ext.compressors.scratch import Scratch

__all__ = ["SteppedTensor", "note_finite"]


class SteppedTensor:
    """A tensor whose writes reach later steps only when the step that made them is committed.

    Residuals and warm starts are fed during forward and backward, before it is known whether the optimizer's step
    counts: a step can be repeated (Megatron's rerun state machine) or skipped. So what a step writes is pending, and
    `commit` or `rollback` decides afterwards. Rolling back is free. Committing is free on a CPU: two buffers change
    places. On a GPU it is one kernel that reads both and writes one, because whether the step was finite is known
    there only, and asking would stall the host; and a CUDA graph needs its tensors where they were.

    Args:
        initial: fp32, or bf16 to keep it in half the memory.
    """

    def __init__(self, initial: torch.Tensor) -> None:
        self._committed = initial
        self._pending = torch.empty_like(initial)
        self._written = False

    @property
    def value(self) -> torch.Tensor:
        """What the step sees: its own last write, or what earlier steps left."""
        return self._pending if self._written else self._committed

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._committed.nbytes + self._pending.nbytes

    @property
    def is_wide(self) -> bool:
        """Whether it is kept in fp32, so that `workspace` lasts until `write`."""
        return self._pending.dtype == torch.float32

    def workspace(self, scratch: Scratch) -> torch.Tensor:
        """An fp32 tensor to compute this step's next value in: where it will be kept, or else memory of `scratch`.

        It may be the tensor that `value` returns.
        """
        if self.is_wide:
            return self._pending
        return scratch.take("stepped", self._pending.shape, torch.float32, self._pending.device)

    def write(self, value: torch.Tensor) -> None:
        """Take `value`, which may be the `workspace`, as this step's."""
        if value is not self._pending:
            self._pending.copy_(value)
        self._written = True

    def commit(self, finite: torch.Tensor, factor: float = 1.0) -> None:
        """Keep this step's value, unless the 0-dim bool tensor `finite` is false; then multiply it by `factor`.

        The choice is made on the device, without a host synchronisation.
        """
        if not self._written:
            return
        self._written = False
        if finite.device.type != "cpu":
            torch.where(finite, self._pending, self._committed, out=self._committed)
        elif finite.numpy():  # in the host's own memory: nothing to wait for
            self._committed, self._pending = self._pending, self._committed
        if factor != 1.0:
            self._committed.mul_(factor)

    def rollback(self) -> None:
        """Forget this step's value."""
        self._written = False

    def rescale(self, factor: torch.Tensor) -> None:
        """Multiply what earlier steps left by a 0-dim tensor on this device. Not within a step."""
        self._committed.mul_(factor)

    @property
    def committed(self) -> torch.Tensor:
        """What counted so far; not a copy."""
        return self._committed

    def restore(self, value: torch.Tensor) -> None:
        """Take `value`, of any device and dtype, for what counted so far.

        Raises:
            ValueError: it has another shape.
        """
        if value.shape != self._committed.shape:
            raise ValueError(f"a tensor of {tuple(value.shape)} where {tuple(self._committed.shape)} is remembered")
        self._committed.copy_(value)
        self._written = False

    def zero_(self) -> None:
        """Forget everything."""
        self._committed.zero_()
        self._written = False


def note_finite(finite: torch.Tensor, factor: torch.Tensor, scratch: Scratch) -> None:
    """Clear the 0-dim bool tensor `finite` if `factor`, of any shape, has a NaN or Inf. On the device."""
    largest = scratch.take("largest", (), torch.promote_types(factor.dtype, torch.float32), factor.device)
    torch.linalg.vector_norm(factor, ord=torch.inf, out=largest, dtype=largest.dtype)
    # NaN is not below infinity, either.
    finite.logical_and_(torch.lt(largest, torch.inf, out=scratch.take("finite", (), torch.bool, factor.device)))
