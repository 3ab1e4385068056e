"""Tensors that remember, but only what counted: the law "state follows the step"."""

import torch

__all__ = ["SteppedTensor"]


class SteppedTensor:
    """A tensor whose writes reach later steps only when the step that made them is committed.

    Residuals and warm starts are fed during forward and backward, before it is known whether the optimizer's step
    counts: a step can be repeated (Megatron's rerun state machine) or skipped. So a step writes to `pending`, and
    `commit` or `rollback` decides afterwards. Rolling back is free; committing costs one pass over the tensor,
    because whether the step was finite is known on the device only, and asking the host would stall it.
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
    def pending(self) -> torch.Tensor:
        """The buffer that this step writes; only meaningful to read after `wrote`."""
        return self._pending

    def wrote(self) -> None:
        """Say that `pending` now holds this step's value."""
        self._written = True

    def commit(self, finite: torch.Tensor) -> None:
        """Keep this step's value, unless the 0-dim bool tensor `finite` is false.

        The choice is made on the device, without a host synchronisation.
        """
        if self._written:
            torch.where(finite, self._pending, self._committed, out=self._committed)
            self._written = False

    def rollback(self) -> None:
        """Forget this step's value."""
        self._written = False

    def zero_(self) -> None:
        """Forget everything."""
        self._committed.zero_()
        self._written = False
