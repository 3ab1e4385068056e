"""Base class of compression techniques, through which the session steps all of them alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.messages import BlockCodecs
from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import block_format
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.schedule import Schedule
from optimus_cc_ext.techniques.state import FactorStates


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Forward-backward pass: a training iteration, or a repetition of one."""

    schedule: Schedule
    number: int
    """Number of iterations that were completed before this one."""

    train_iters: int | None = None
    """Number of iterations of the whole run; None if it is unknown."""

    measured: bool = False
    """True if errors and times of this iteration will be reported."""

    def is_among_the_first(self, fraction: float) -> bool:
        """Return whether this iteration belongs to the first `fraction` of the training."""
        # The percentage is rounded, because 0.29 * 100 is a little less than 29 in floating point.
        return self.number < round(fraction * (self.train_iters or 0))


@dataclass
class StepProgress:
    """Position of this rank within a training step."""

    iteration: int = 0
    open: bool = False
    """True if the training loop has announced the step, and will announce its end."""

    measured: bool = False
    """True if errors and times of this step will be asked for."""

    loss_scale: torch.Tensor | None = None
    """Factor of the last pass's gradients, and so of the residuals; 0-dim. None: no loss scale."""

    passes: int = 0
    """Number of forward-backward passes of this step so far; with several, gradients are accumulated over the
    passes.
    """

    failed: bool = False
    """True if a pass raised an exception, so that the changes of the passes must be discarded."""

    zeroed: bool = False
    """True from the zeroing of the gradients until the ranks have exchanged which class saw no message."""

    reduced: bool = False
    """True if the reduction of a gradient bucket began in a pass of this step."""

    strayed: bool = False
    """True if the reduction of a gradient bucket began outside of a pass."""

    repeated: bool = False
    """True if a pass of this step was discarded, because the step was begun or run again."""

    work: tuple[Schedule, ...] = ()
    """The passes that this step has begun, since it was begun the last time."""


class Technique:
    """Base class of the techniques on this rank, one for each class of traffic.

    Args:
        config: the configuration of the run.
        traffic: the class of traffic.
        ring: memory for messages of buckets, which techniques may share; None: memory of its own.
    """

    urgent = False
    """The argument of `Ring.lane`."""

    states_on_demand = False
    """True if a state is made when its first message comes."""

    def __init__(self, config: OptimusConfig, traffic: TrafficClass, ring: Ring | None = None) -> None:
        self.config, self.traffic, self.name = config, traffic, traffic.name
        self.remembers = config.remembers(traffic)
        """True if it has compression state in this run. Without state it has no part in checkpoints."""

        self.scratch, self.lane = Scratch(), (ring or Ring()).lane(urgent=self.urgent)
        self.gauge = Gauge(self.scratch)
        """Measures the compression error and the seconds."""

        self.states = FactorStates(getattr(config, f"{self.name}_rank", 1), made_on_demand=self.states_on_demand)
        """Residuals and warm starts; empty in formats other than low-rank."""

        self.left_dense = False
        """True if a preset leaves the class dense, because nothing of it leaves a node."""

        self.dense = False
        """True while the class is sent as in vanilla Megatron, on all ranks alike (module `trial`)."""

        self.on_trial = False
        """True while a trial compares gathers of parameters with dense ones; False for all other classes."""

        self.alone: dist.ProcessGroup | None = None
        """Single-rank process group, which Megatron's collective gets while the technique replaces it."""

    def new_codec(self) -> Codec | None:
        """Make a codec with memory of its own for the format of the class; None if that is no block format."""
        format = block_format(self.config.format_of(self.traffic))
        return None if format is None else self._fast_codec(format)

    def new_codecs(self) -> BlockCodecs | None:
        """Make codecs for gradients and for their sums; None if the format of the class is no block format."""
        return BlockCodecs.of(self.config.format_of(self.traffic), self._fast_codec)

    def _fast_codec(self, format: str) -> Codec:
        # `--exact-blocks`, a flag of the tests, replaces the chosen format by the pass-through format.
        name = "fp32" if self.config._exact_blocks else format
        return fast_codec(name, seed=self.config.compression_seed, rotated=self.config.block_rotation)

    def place(self, grid: Grid, layout: Layout, groups: NewGroups) -> None:
        """Take this rank's place, and make the process groups that the technique needs; do nothing if it is off.

        Called on all ranks of the model in the same order, because making groups is collective over their members.
        """

    def preallocate(self, schedule: Schedule, like: torch.Tensor) -> None:
        """Allocate memory for passes by `schedule`.

        Args:
            like: has the shape, dtype and device of the activation gradients.
        """

    def unseen(self, applied_steps: int) -> str | None:
        """Return why no traffic of the class may have passed in the first steps, if some should have; None: it has.

        Args:
            applied_steps: the number of steps that were applied before this one.
        """
        return None

    def shrinks(self, like: torch.Tensor | None) -> bool | None:
        """Return whether any of this rank's traffic would be compressed into fewer bytes; None if that is unknown.

        Args:
            like: has the shape and dtype of the activation gradients; None: these are not known beforehand.
        """
        return None

    @property
    def message_bytes(self) -> int:
        """Bytes of memory for messages of gradients and parameters."""
        return 0

    def release(self) -> None:
        """Drop the memory for messages, between two steps: the class stays dense from now on."""

    def begin(self, this: Iteration) -> None:
        self.gauge.begin(this.measured)

    def commit(self, shrinkage: Mapping[str, float]) -> None:
        """Commit an applied step (`FactorState.commit`). Its seconds count as seconds of the technique."""
        if (device := self.states.device) is not None:
            with self.gauge.timed(device):
                self.states.commit(shrinkage)

    def end(self) -> None:
        """End the pass. Raises RanksDisagree if the number of messages does not match the schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tensors (not copies), numbers and strings."""
        return {"states": self.states.state_dict()}

    def mismatch(self, state_dict: Mapping[str, Any]) -> str | None:
        """Return why `load_state_dict` would refuse a state; None if it would not."""
        return self.states.mismatch(state_dict["states"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; raises ValueError if `mismatch` has a reason."""
        self.states.load_state_dict(state_dict["states"])
