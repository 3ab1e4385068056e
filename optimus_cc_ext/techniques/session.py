"""The session of a model: what is configured, where this rank stands, and how its techniques are stepped.

Hooks find the session by the model; it never imports Megatron. It is placed in the grid (`place`) when the model is
wrapped, and told about steps and passes:

    begin_step -> (iteration: one forward-backward pass) once, or again where a step is repeated -> end_step
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.fast import fast_codec, fast_compressor
from optimus_cc_ext.compressors.formats import block_format
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.config.presets import Layout, check_layout
from optimus_cc_ext.metrics.report import Report, StageMetrics, collect, technique_metrics
from optimus_cc_ext.metrics.traffic import Traffic
from optimus_cc_ext.techniques.agreement import agree
from optimus_cc_ext.techniques.clipping import UsualClipping
from optimus_cc_ext.techniques.compressed_backprop import CompressedBackprop, CompressedForward
from optimus_cc_ext.techniques.exchange import BlockCodecs
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.messages import coded_in
from optimus_cc_ext.techniques.param_gather import ParamGather
from optimus_cc_ext.techniques.schedule import NonInterleaved, Schedule
from optimus_cc_ext.techniques.selective_stage_compression import SelectiveStageCompression
from optimus_cc_ext.techniques.state import state_dtype
from optimus_cc_ext.techniques.technique import Iteration, Technique
from optimus_cc_ext.techniques.transfer import Transfer

__all__ = ["Session"]


@dataclass
class _Step:
    """Where in a training step this rank is."""

    iteration: int = 0
    open: bool = False
    """Whether the training loop said that it began, and will say how it ended."""

    measured: bool = False
    """Whether errors and times of this step will be asked for."""

    loss_scale: torch.Tensor | None = None
    """What the gradients of the last pass, and with them the residuals, were multiplied by; 0-dim. None: nothing."""

    passes: int = 0
    """Forward-backward passes of this step so far; more than one: gradients are accumulated over these passes."""

    failed: bool = False
    """Whether a pass raised: what the passes left behind counts for nothing."""


class Session:
    """State of one model's compression on one rank: its grid, techniques and iteration.

    Args:
        config: what was asked for.
        layout: what the command line said about the run; None where no Megatron arguments exist.
        train_iters: iterations of the run, for a training loop of one's own.
    """

    def __init__(self, config: OptimusConfig, layout: Layout | None = None, train_iters: int | None = None) -> None:
        self.config, self.layout, self.train_iters = config, layout, train_iters
        self.grid: Grid | None = None
        self.new_groups: NewGroups | None = None
        """The process groups of our own; None with every technique off."""

        self.traffic = Traffic()
        self.active = False
        """Inside a training iteration. Forward-only passes leave it False, and then nothing is touched."""

        self.follows_zeroing = False
        """True if the session is told when the gradients are zeroed (`restart_step`): passes in between accumulate. A
        session that is not told takes a later pass of a step for a repetition of the earlier one."""

        # Links and buckets share no memory: on a GPU, buckets are reduced on a stream of their own.
        dtype = state_dtype(config.compression_state_dtype)
        self.forward = CompressedForward(self.new_codec(config.pipeline_forward_format))
        self.backprop = CompressedBackprop(config, fast_compressor(), self.new_codec(coded_in(config)))
        self.gradients = SelectiveStageCompression(
            config, fast_compressor(), seed=config.compression_seed, state_dtype=dtype,
            codecs=self.new_codecs(config.dp_compression_format), wire=self.new_codec(config.low_rank_wire),
        )  # fmt: skip
        self.parameters = ParamGather(self.new_codec(config.param_gather_format))
        self.embedding = FusedEmbeddingSync(
            wanted=config.fused_embedding_sync, codecs=self.new_codecs(config.fused_embedding_sync_format)
        )
        self.techniques: tuple[Technique, ...] = (
            self.forward, self.backprop, self.gradients, self.parameters, self.embedding
        )  # fmt: skip
        self._usual_clipping: dict[str, UsualClipping] = defaultdict(UsualClipping)
        # By gradient-norm group; equal on all ranks, because the norms are.
        self._preallocated = False
        self._unreported_steps = 0
        self._step = _Step()

    def new_codec(self, chosen: str) -> Codec | None:
        """A codec of its own, and so with memory of its own, for a class of traffic; None where that has no blocks."""
        format = block_format(chosen)
        return None if format is None else self._fast_codec(format)

    def _fast_codec(self, format: str) -> Codec:
        # `--exact-blocks`, a flag of the tests: the pass-through format in the place of the chosen one.
        name = "exact" if self.config.exact_blocks else format
        return fast_codec(name, seed=self.config.compression_seed, rotated=self.config.block_rotation)

    def new_codecs(self, chosen: str) -> BlockCodecs | None:
        """The same for gradients and for their sums."""
        return BlockCodecs.of(chosen, self._fast_codec)

    def report(self, device: torch.device, iterations: int | None = None) -> Report:
        """Add up over all ranks the traffic since the last report, and what the last pass measured.

        Collective over all ranks of the model; reads from the device.

        Args:
            device: where collectives of the default group take their tensors.
            iterations: how many the report covers; None: the applied steps since the last report.
        """
        assert self.grid is not None, "the session has no place in the grid yet"
        techniques = {technique.name: technique for technique in self.techniques}
        mine = StageMetrics(
            ranks=1,
            techniques={
                each.title: technique_metrics(
                    techniques[each.name].gauge, techniques[each.name].states.residuals(), self.loss_scale
                )
                for each in CLASSES
            },
            statistics=self.backprop.statistics.sums(),
        )
        steps = self._unreported_steps if iterations is None else iterations
        self._unreported_steps = 0
        return collect(
            mine, self.grid.place.stage, self.grid.stages,
            {each.title: self.config.format_of(each) for each in CLASSES},
            self.traffic.since_last_report(), max(1, steps), self.grid.sum, device,
        )  # fmt: skip

    def transfers(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Transfer]:
        """See `CompressedBackprop.transfers`; of activations, too."""
        transfers = self.forward.transfers(tensors)
        for role, transfer in self.backprop.transfers(tensors).items():
            transfers[role] = transfers[role].then(transfer.after_wait) if role in transfers else transfer
        return transfers

    @property
    def compresses_between_stages(self) -> bool:
        """Whether activations or their gradients are sent or received compressed by this rank."""
        links = self.backprop.sending, self.backprop.receiving
        return self.forward.messages is not None or any(link is not None for link in links)

    # -- placing ------------------------------------------------------------------------------------------------

    def place(self, grid: Grid, layout: Layout) -> list[str]:
        """Take a place in the grid, once; the log lines about it.

        Collective over all ranks of the model where a technique is on, and of no others; with every technique off it
        waits for nobody.

        Raises:
            FlagError: a technique cannot work on this layout.
            RanksDisagree: ranks run with different settings, or on machines that give different bits.
        """
        if self.grid is not None:
            return []
        check_layout(self.config, layout)
        self.grid, self.layout = grid, layout
        if not self.config.any_technique:
            return []
        places, notes = agree(grid, self.config, layout)
        self.new_groups = NewGroups(places, grid.replica_group, grid.timeout)
        for technique in self.techniques:
            technique.place(grid, layout, self.new_groups)
        return notes

    @property
    def alone(self) -> dist.ProcessGroup | None:
        """The group of this rank only, which Megatron's collectives are lent where a technique replaces them."""
        return next((technique.alone for technique in self.techniques if technique.alone is not None), None)

    def preallocate(self, schedule: Schedule, gradient: torch.Tensor | None) -> bool:
        """Make room before the first iteration, whose gradients between stages will be like `gradient`.

        Returns:
            Whether this was the first call, and there is memory to speak of.
        """
        if self._preallocated:
            return False
        self._preallocated = True
        if gradient is not None:
            for technique in self.techniques:
                technique.preallocate(schedule, gradient)
        return self.config.any_technique

    @property
    def message_bytes(self) -> int:
        """Memory of this rank for messages of gradients, of the tied embedding and of parameters."""
        return sum(technique.message_bytes for technique in self.techniques)

    # -- steps and iterations -----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What this iteration's gradients and residuals were multiplied by, read from the device."""
        return 1.0 if self._step.loss_scale is None else float(self._step.loss_scale)

    @property
    def completed_steps(self) -> int:
        """Steps whose update counted."""
        return self._step.iteration

    @property
    def in_step(self) -> bool:
        """Whether a pass has begun and its step has not been settled yet: the gradients that are reduced are its own.

        Longer than `active`: a training loop may reduce and finalise its gradients after the pass.
        """
        return self._step.passes > 0

    @property
    def succeeds(self) -> bool:
        """True if no pass of this step has raised so far."""
        return not self._step.failed

    def begin_step(self, iteration: int | None, *, measured: bool = False) -> None:
        """The training loop starts a step. `iteration` counts completed ones; None: we count ourselves.

        A step that was begun and not ended was abandoned: it leaves no trace.

        Args:
            measured: whether errors and times of this step will be asked for.
        """
        self._settle(applied=self._each_pass_counts)
        self._step.open, self._step.measured = True, measured
        if iteration is not None:
            self._step.iteration = iteration

    def end_step(self, *, applied: bool, clip: Mapping[str, float] | None = None) -> None:
        """The step ended.

        Args:
            applied: whether the optimizer's update counted.
            clip: by gradient-norm group, what clipping multiplied its gradients by.
        """
        self._settle(applied=applied, clip=clip)
        self._step.open = self._step.measured = False

    def restart_step(self, *, measured: bool = False) -> None:
        """Note that the gradients are zeroed: passes of the step that is not ended are repeated, and leave no trace.

        Args:
            measured: see `begin_step`, which decides if the training loop announced the step.
        """
        self._settle(applied=False)
        if not self._step.open:
            self._step.measured = measured

    @property
    def is_announced(self) -> bool:
        """True between `begin_step` and `end_step`."""
        return self._step.open

    @property
    def _each_pass_counts(self) -> bool:
        """True if nobody tells the session where steps begin and end: each pass is taken for an applied step."""
        return not (self._step.open or self.follows_zeroing)

    @contextmanager
    def iteration(self, schedule: Schedule, loss_scale: torch.Tensor | None = None) -> Iterator[None]:
        """One forward-backward pass by `schedule`, whose loss is multiplied by the 0-dim tensor `loss_scale`.

        Raises:
            RanksDisagree: more or fewer gradient messages passed than the schedule has.
        """
        self.begin_pass(schedule, loss_scale)
        failed = self._step.failed
        self.active = self._step.failed = True
        try:
            yield
            self._step.failed = failed
        finally:
            self.active = False
        for technique in self.techniques:
            technique.end()

    def before_reduction(self) -> None:
        """Begin a pass with the first gradient that is reduced, where no schedule has: one stage needs no schedule."""
        if self.in_step or not self.follows_zeroing or self.grid is None or self.grid.stages > 1:
            return
        if self.gradients.stages_are_open:  # only the passes of a schedule are timed, which the forecast needs
            self.gradients.choose_stages([self.grid.place.stage])
        self.begin_pass(NonInterleaved(1, 1))

    def begin_pass(self, schedule: Schedule, loss_scale: torch.Tensor | None = None) -> None:
        """Begin a forward-backward pass; see `iteration`, which knows where the pass ends, too."""
        if not self.follows_zeroing:
            # In a step whose begin we were told, a second pass repeats the first: what the first left must not count.
            self._settle(applied=self._each_pass_counts)
        if not self._step.passes:
            self._rescale_residuals(loss_scale)
        this = Iteration(
            schedule=schedule, number=self._step.iteration,
            train_iters=self.layout.train_iters if self.layout else None, measured=self._step.measured,
        )  # fmt: skip
        for technique in self.techniques:
            technique.begin(this)
        self._step.passes += 1

    def _rescale_residuals(self, loss_scale: torch.Tensor | None) -> None:
        """Bring the residuals to this pass's loss scale, without asking the host what it is."""
        if loss_scale is not None and self._step.loss_scale is not None:
            factor = loss_scale / self._step.loss_scale
            for technique in self.techniques:
                technique.states.rescale_residuals(factor)
        self._step.loss_scale = loss_scale

    def _settle(self, *, applied: bool, clip: Mapping[str, float] | None = None) -> None:
        """Decide about what the passes since the last decision left behind."""
        if not self._step.passes:
            return
        if applied and not self._step.failed:
            # Where nothing is remembered nothing is shrunk, and a checkpoint keeps nothing.
            clip = clip if any(technique.on for technique in self.techniques) else None
            shrinkage = {group: self._usual_clipping[group].shrinkage(c) for group, c in (clip or {}).items()}
            for technique in self.techniques:
                technique.commit(shrinkage)
            self._step.iteration += 1
            self._unreported_steps += 1
        else:
            for technique in self.techniques:
                technique.states.rollback()
        self._step.passes, self._step.failed = 0, False

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on from here, by technique: tensors (not copies), numbers and strings.

        In a step that is not ended, that is the state before the step; where nobody says where steps end, every pass
        counts.
        """
        if self._each_pass_counts:
            self._settle(applied=True)
        state: dict[str, Any] = {"iteration": self._step.iteration}
        if self._step.loss_scale is not None:
            state["loss_scale"] = self._step.loss_scale
        if self._usual_clipping:
            state["usual_clipping"] = {group: usual.state for group, usual in self._usual_clipping.items()}
        return state | {technique.name: technique.state_dict() for technique in self.techniques if technique.on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank. A technique that is missing in it keeps its state.

        Raises:
            ValueError: it does not fit what is switched on here; then nothing is changed.
        """
        if reasons := self.mismatches(state):
            raise ValueError("; ".join(f"{technique}: {reason}" for technique, reason in reasons.items()))
        self._step = _Step(iteration=state["iteration"], loss_scale=state.get("loss_scale"))
        for group, usual in state.get("usual_clipping", {}).items():
            self._usual_clipping[group] = UsualClipping.from_state(usual)
        for technique in self.techniques:
            if technique.on and technique.name in state:
                technique.load_state_dict(state[technique.name])

    def mismatches(self, state: Mapping[str, Any]) -> dict[str, str]:
        """By technique: why `load_state_dict` would refuse `state`."""
        reasons = {t.name: t.mismatch(state[t.name]) for t in self.techniques if t.on and t.name in state}
        return {name: reason for name, reason in reasons.items() if reason}
