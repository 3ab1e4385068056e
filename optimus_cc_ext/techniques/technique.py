"""The technique as the session knows it: one protocol, so that the session loops over all of them alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.schedule import Schedule
from optimus_cc_ext.techniques.state import FactorStates

__all__ = ["Iteration", "Technique"]


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One forward-backward pass: a training iteration, or a repetition of one."""

    schedule: Schedule
    number: int
    """How many iterations were completed before it."""

    train_iters: int | None = None
    """How many there will be; None: nobody knows."""

    measured: bool = False
    """Whether errors and times of it will be reported."""

    def is_among_the_first(self, fraction: float) -> bool:
        """Whether this iteration belongs to the first `fraction` of the training."""
        # Rounded: 0.29 of 100 is a little less than 29 in floating point.
        return self.number < round(fraction * (self.train_iters or 0))


class Technique:
    """A technique on this rank.

    Args:
        name: in checkpoints.
        on: whether it remembers anything in this run. Where it does not it has no part in checkpoints.
        states: what it remembers.
        gauge: measures what it leaves out and costs.
    """

    def __init__(self, name: str, *, on: bool, states: FactorStates, gauge: Gauge) -> None:
        self.name, self.on, self.states, self.gauge = name, on, states, gauge

        self.alone: dist.ProcessGroup | None = None
        """The group of this rank only, which Megatron's collective is lent where the technique replaces it."""

    def place(self, grid: Grid, layout: Layout, groups: NewGroups) -> None:
        """Take this rank's place, and make the process groups that the technique needs; nothing where it is off.

        Called on all ranks of the model in the same order, because making groups is collective over their members.
        """

    def preallocate(self, schedule: Schedule, like: torch.Tensor) -> None:
        """Make room for passes by `schedule`.

        Args:
            like: has the shape, dtype and device of the gradients between stages.
        """

    def shrinks(self, like: torch.Tensor | None) -> bool | None:
        """Return whether anything of this rank's traffic would be compressed into fewer bytes; None: nobody can tell.

        Args:
            like: has the shape and dtype of the gradients between stages; None: they are not known beforehand.
        """
        return None

    @property
    def message_bytes(self) -> int:
        """Memory that is kept for messages of gradients and parameters."""
        return 0

    def begin(self, this: Iteration) -> None:
        """A forward-backward pass begins."""
        self.gauge.begin(this.measured)

    def commit(self, shrinkage: Mapping[str, float]) -> None:
        """The step counted; see `FactorState.commit`. What that takes is part of what the technique costs."""
        if (device := self.states.device) is not None:
            with self.gauge.timed(device):
                self.states.commit(shrinkage)

    def end(self) -> None:
        """It has ended; raises RanksDisagree if what passed is not what its schedule has."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: tensors (not copies), numbers and strings."""
        return {"states": self.states.state_dict()}

    def mismatch(self, state_dict: Mapping[str, Any]) -> str | None:
        """Why `load_state_dict` would refuse, or None."""
        if not isinstance(state_dict.get("states"), Mapping):
            return "it was saved by a version that did not name its states: leave it out, and residuals start empty"
        return self.states.mismatch(state_dict["states"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; ValueError where `mismatch` has a reason."""
        self.states.load_state_dict(state_dict["states"])
