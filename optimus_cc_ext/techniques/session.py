"""Session of a model: its configuration, this rank's place, and the steps of its techniques.

Hooks find the session by the model; it never imports Megatron. It is placed in the grid (`place`) when the model is
wrapped, and told about steps and passes:

    begin_step -> (iteration: one forward-backward pass) once, or again if a step is repeated -> end_step
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.nodes import rdma_cards
from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.compressors.formats import EXACT
from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.classes import TrafficClass, classes_among
from optimus_cc_ext.config.presets import Layout, check_layout
from optimus_cc_ext.metrics.report import Report, StageMetrics, collect, technique_metrics
from optimus_cc_ext.metrics.traffic import Traffic
from optimus_cc_ext.techniques.agreement import agree
from optimus_cc_ext.techniques.clipping import UsualClipping
from optimus_cc_ext.techniques.compressed_backprop import CompressedBackprop, CompressedForward
from optimus_cc_ext.techniques.crossing import (
    crossing_lines,
    exchange_lines,
    leaving_roles,
    left_dense,
    levels_of_sums,
)
from optimus_cc_ext.techniques.exact_gather import ExactGather
from optimus_cc_ext.techniques.expert_rows import ExpertRows
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.param_gather import ParamGather
from optimus_cc_ext.techniques.schedule import NonInterleaved, Schedule
from optimus_cc_ext.techniques.selective_stage_compression import SelectiveStageCompression
from optimus_cc_ext.techniques.technique import Iteration, StepProgress, Technique
from optimus_cc_ext.techniques.transfer import Transfer
from optimus_cc_ext.techniques.trial import Trial


class Session:
    """State of one model's compression on one rank: its grid, techniques and iteration.

    Args:
        config: the configuration.
    """

    def __init__(self, config: OptimusConfig) -> None:
        self.config = config
        self.layout: Layout | None = None
        """The facts about the run; None until the session has its place."""

        self.grid: Grid | None = None
        self.new_groups: NewGroups | None = None
        """Process groups of our own; None with every technique off."""

        self.left_dense: frozenset[TrafficClass] = frozenset()
        """The classes of traffic that are left dense because nothing of them leaves a node."""

        self.leaving_roles: frozenset[str] = frozenset()
        """Roles, of `send_prev` and `send_next`, whose messages leave this rank's node."""

        self.levels_of_sums: str | None = None
        """Levels in which gradients are added up in blocks, in words; None: no gradients are added up in blocks."""

        self.traffic = Traffic()
        self.most_memory = 0
        """Bytes of messages and of compression state on the rank that has most, when they were allocated."""

        self.active = False
        """True inside a training iteration. Forward-only passes leave it False, and then nothing is changed."""

        self.follows_zeroing = False
        """True if the session is told when the gradients are zeroed (`restart_step`): passes in between accumulate.
        Otherwise a later pass of a step counts as a repetition of the earlier one.
        """

        self.steps_are_announced = False
        """True if no optimizer is known that ends the steps, so that the training loop has to announce each of them."""

        self.applied_steps = 0
        """Number of steps applied since the session was made; those before a checkpoint do not count."""

        self._usual_clipping: dict[str, UsualClipping] = defaultdict(UsualClipping)
        # Usual clipping coefficients, by gradient-norm group, are equal on all ranks, because the norms are.
        self._preallocated = False
        self._unreported_steps = 0
        self._fallback: str | None = None
        """The reason why torch computes in place of Triton's kernels."""

        self.step = StepProgress()
        # Links and buckets share no memory, because on a GPU, buckets are reduced on a stream of their own.
        self.ring = Ring()
        self.forward = CompressedForward(config, classes.PIPELINE_FORWARD)
        self.backprop = CompressedBackprop(config, classes.PIPELINE_BACKWARD)
        self.embedding = FusedEmbeddingSync(config, classes.EMBEDDING, self.ring)
        self.gradients = SelectiveStageCompression(config, classes.DP_GRADIENTS, self.ring)
        exact = config.format_of(classes.PARAM_GATHER) == EXACT
        self.parameters: ParamGather = (ExactGather if exact else ParamGather)(config, classes.PARAM_GATHER, self.ring)
        self.rows = [ExpertRows(config, traffic) for traffic in classes_among("experts")]
        """Tokens on their way to experts and back, and their gradients."""

        self.trial: Trial | None = None
        """Trial of what a preset compresses; None: everything is compressed as the configuration says."""

        self.techniques: tuple[Technique, ...] = (
            self.forward, self.backprop, self.embedding, self.gradients, self.parameters, *self.rows
        )  # fmt: skip

    def report(self, device: torch.device, iterations: int | None = None) -> Report:
        """Sum the bytes since the last report, and the measurements of the last pass, over all ranks.

        Collective over all ranks of the model; reads from the device.

        Args:
            device: the device of tensors in collectives of the default group.
            iterations: number of iterations in the report; None: the steps since the last report that had a pass.
        """
        assert self.grid is not None, "the session has no place in the grid yet"
        mine = StageMetrics(
            ranks=1,
            techniques={
                each.traffic.tag: technique_metrics(each.gauge, each.states.residuals(), self.loss_scale)
                for each in self.techniques
            },
            statistics=self.backprop.statistics.sums(),
        )
        steps = self._unreported_steps if iterations is None else iterations
        self._unreported_steps = 0
        report = collect(
            mine, self.grid.place.stage, self.grid.stages,
            {each.tag: self.config.format_of(each) for each in classes.CLASSES},
            self.traffic.since_last_report(), max(1, steps), self.grid.sum, device,
        )  # fmt: skip
        return replace(report, fallback=self._fallback, memory=self.most_memory)

    def transfers(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Transfer]:
        """Make the transfers that replace tensors of one of Megatron's point-to-point calls: activations and their
        gradients.
        """
        if not self.config.any_technique:
            return {}
        transfers = self.forward.transfers(tensors)
        for role, transfer in self.backprop.transfers(tensors).items():
            transfers[role] = transfers[role].then(transfer.after_wait) if role in transfers else transfer
        return transfers

    @property
    def compresses_between_stages(self) -> bool:
        """True if this rank sends or receives activations or their gradients compressed."""
        return self.forward.compresses or self.backprop.compresses

    # -- placing ------------------------------------------------------------------------------------------------

    def place(self, grid: Grid, layout: Layout) -> list[str]:
        """Take a place in the grid, once, with the layout of the built model; return the log lines about it.

        Collective over all ranks of the model if a technique is on, and over no others; with every technique off it
        waits for no rank.

        Raises:
            FlagError: a technique cannot work on this layout.
            RanksDisagree: ranks run with different settings, or on machines that give different bits.
        """
        check_layout(self.config, layout)
        self.grid, self.layout = grid, layout
        if not self.config.any_technique:
            return []
        places, notes, self._fallback = agree(grid, self.config, layout)
        notes += crossing_lines(self.config, places, layout.instances)
        notes += exchange_lines(self.config, places, layout, rdma_cards())
        self.leaving_roles = leaving_roles(places, grid.place.rank, grid.place.stage)
        self.levels_of_sums = levels_of_sums(self.config, places, layout.instances)
        self.left_dense = left_dense(self.config, places, layout.instances)
        self.new_groups = NewGroups(places, grid.replica_group, grid.timeout)
        for technique in self.techniques:
            technique.left_dense = technique.traffic in self.left_dense
            technique.place(grid, layout, self.new_groups)
        return notes

    @property
    def expert_hops(self) -> Groups | None:
        """The groups by which tokens go once a node in this step; None: they go direct, as in a trial's dense steps."""
        return None if any(rows.dense for rows in self.rows) else self.rows[0].hops

    @property
    def alone(self) -> dist.ProcessGroup | None:
        """Single-rank process group, which Megatron's collectives get while a technique replaces them."""
        return next((technique.alone for technique in self.techniques if technique.alone is not None), None)

    def preallocate(self, schedule: Schedule, gradient: torch.Tensor | None) -> bool:
        """Allocate message buffers and residuals before the first iteration; return True if a technique is on.

        Args:
            gradient: has the shape, dtype and device of an activation gradient; None: these are not known beforehand.
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
        """Bytes of memory on this rank for messages of gradients, of the tied embedding and of parameters."""
        return self.ring.nbytes + sum(technique.message_bytes for technique in self.techniques)

    @property
    def memory_bytes(self) -> int:
        """Bytes of messages and of compression state on this rank."""
        return self.message_bytes + sum(technique.states.nbytes for technique in self.techniques)

    # -- steps and iterations -----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Factor of this iteration's gradients and residuals, read from the device."""
        return 1.0 if self.step.loss_scale is None else float(self.step.loss_scale)

    @property
    def completed_steps(self) -> int:
        return self.step.iteration

    @property
    def in_step(self) -> bool:
        """True if a pass has begun and its step has not been settled yet: the gradients that are reduced belong to it.

        It is True longer than `active`: a training loop may reduce and finalise its gradients after the pass.
        """
        return self.step.passes > 0

    def begin_step(self, iteration: int | None, *, measured: bool = False) -> None:
        """Begin a step, which the training loop announces. `iteration` is the number of completed steps; None: count
        here.

        A step that was begun and not ended counts as abandoned: its changes of the state are discarded.

        Args:
            measured: True if errors and times of this step will be asked for.
        """
        self._settle(applied=False)
        self.step.open = True
        if iteration is not None:
            self.step.iteration = iteration
        self._begin_way(measured=measured)

    def end_step(
        self, *, applied: bool, clip: Mapping[str, float] | None = None, unusual: bool | None = None
    ) -> None:  # fmt: skip
        """End the training step.

        Args:
            applied: False if the optimizer skipped its update.
            clip: the factor by which clipping multiplied the gradients, by gradient-norm group.
            unusual: True if the step was `is_unusual` on a rank; None: all ranks are alike.
        """
        unusual, had_passes = self.is_unusual if unusual is None else unusual, self.in_step
        applied = applied and not self.step.failed
        self._settle(applied=applied, clip=clip)
        self.step.open = self.step.measured = False
        if had_passes and self.trial is not None:
            self.trial.end(self.step.work, self.step.iteration, applied=applied, alike=not unusual)
        self.step.work, self.step.repeated = (), False

    @property
    def is_unusual(self) -> bool:
        """True if a trial cannot compare this step with others: it was repeated, or has other passes than those."""
        return self.trial is not None and (self.step.repeated or self.trial.is_unusual(self.step.work))

    def _begin_way(self, *, measured: bool) -> None:
        """Begin a step, or begin it again: in the way that a trial says, where gauges would slow one way alone."""
        on_trial = self.trial is not None and self.trial.begin()
        self.step.work, self.step.measured = (), measured and not on_trial

    def restart_step(self, *, measured: bool = False) -> None:
        """Discard the passes of a step that has not ended, because the gradients are zeroed and the passes will be
        repeated. `measured` is that of `begin_step`, whose value counts in a step that the training loop announced.
        """
        self.step.repeated |= self.in_step
        self._settle(applied=False)
        self.step.zeroed, self.step.reduced, self.step.strayed = True, False, False
        if not self.step.open:
            self._begin_way(measured=measured)

    @contextmanager
    def iteration(self, schedule: Schedule, loss_scale: torch.Tensor | None = None) -> Iterator[None]:
        """Run one forward-backward pass by `schedule`, whose loss is multiplied by the 0-dim tensor `loss_scale`.

        Raises:
            RanksDisagree: more or fewer gradient messages passed than the schedule has.
        """
        self.begin_pass(schedule, loss_scale)
        failed = self.step.failed
        self.active = self.step.failed = True
        try:
            yield
            self.step.failed = failed
        finally:
            self.active = False
        for technique in self.techniques:
            technique.end()

    def before_reduction(self) -> None:
        """Begin a pass at the first reduced gradient if no schedule has begun one: a single stage needs no schedule."""
        if not self.in_step and self.follows_zeroing and self.grid is not None and self.grid.stages == 1:
            self.begin_pass(NonInterleaved(1, 1))
        self.step.reduced |= self.in_step
        self.step.strayed |= not self.in_step

    def begin_pass(self, schedule: Schedule, loss_scale: torch.Tensor | None = None) -> None:
        """Begin a forward-backward pass, whose end is unknown here; `iteration` knows the end, too."""
        if not self.follows_zeroing:
            # In an announced step, a second pass repeats the first one, whose changes must be discarded.
            self.step.repeated |= self.in_step
            self._settle(applied=False)
        if not self.step.passes:
            self._rescale_residuals(loss_scale)
            self._unreported_steps += 1
        this = Iteration(
            schedule=schedule, number=self.step.iteration,
            train_iters=self.layout.train_iters if self.layout else None, measured=self.step.measured,
        )  # fmt: skip
        for technique in self.techniques:
            technique.begin(this)
        self.step.passes += 1
        self.step.work += (schedule,)

    def _rescale_residuals(self, loss_scale: torch.Tensor | None) -> None:
        """Scale the residuals to this pass's loss scale, on the device."""
        if loss_scale is not None and self.step.loss_scale is not None:
            factor = loss_scale / self.step.loss_scale
            for technique in self.techniques:
                technique.states.rescale_residuals(factor)
        self.step.loss_scale = loss_scale

    def _settle(self, *, applied: bool, clip: Mapping[str, float] | None = None) -> None:
        """Commit or discard the changes of all passes since the last call."""
        if not self.step.passes:
            return
        if applied and not self.step.failed:
            # Without compression state there is nothing to scale, and checkpoints have no clip factors.
            clip = clip if any(technique.remembers for technique in self.techniques) else None
            shrinkage = {group: self._usual_clipping[group].shrinkage(c) for group, c in (clip or {}).items()}
            for technique in self.techniques:
                technique.commit(shrinkage)
            self.step.iteration += 1
            self.applied_steps += 1
        else:
            for technique in self.techniques:
                technique.states.rollback()
        self.step.passes, self.step.failed = 0, False

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a run needs to resume, by technique: tensors (not copies), numbers and strings.

        In a step that has not ended, the result is the state before the step.
        """
        state: dict[str, Any] = {"iteration": self.step.iteration}
        if self.step.loss_scale is not None and any(technique.states.state_dict() for technique in self.techniques):
            state["loss_scale"] = self.step.loss_scale
        if self._usual_clipping:
            state["usual_clipping"] = {group: usual.state for group, usual in self._usual_clipping.items()}
        if self.trial is not None and self.trial.state is not None:
            state["trial"] = self.trial.state
        return state | {technique.name: technique.state_dict() for technique in self.techniques if technique.remembers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state that `state_dict` returned on this rank. A technique that is missing in it keeps its
        state.

        Raises:
            ValueError: the state does not fit the techniques that are on; nothing is changed then.
        """
        if reasons := self.mismatches(state):
            raise ValueError("; ".join(f"{technique}: {reason}" for technique, reason in reasons.items()))
        self.step = StepProgress(iteration=state["iteration"], loss_scale=state.get("loss_scale"))
        for group, usual in state.get("usual_clipping", {}).items():
            self._usual_clipping[group] = UsualClipping.from_state(usual)
        for technique in self.techniques:
            if technique.remembers and technique.name in state:
                technique.load_state_dict(state[technique.name])
        if self.trial is not None:
            self.trial.resume(state.get("trial"), state)

    def mismatches(self, state: Mapping[str, Any]) -> dict[str, str]:
        reasons = {t.name: t.mismatch(state[t.name]) for t in self.techniques if t.remembers and t.name in state}
        return {name: reason for name, reason in reasons.items() if reason}
