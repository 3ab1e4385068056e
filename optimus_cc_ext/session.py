"""The one installed session: what is configured, where this rank stands, and the state of every technique.

Hooks ask the session; it never imports Megatron. A session is made by `install`, placed in the grid (`place`) when
the first model is wrapped, and told about steps and iterations:

    begin_step -> (begin_iteration -> end_iteration) once, or again where a step is repeated -> end_step
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors import LowRank, Scratch, fast_compressor
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.resolve import Layout, check_layout
from optimus_cc_ext.techniques.clipping import UsualClipping
from optimus_cc_ext.techniques.compressed_backprop import LinkPlan, ReceivingLink, SendingLink
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync, RankPlace, union_ranks
from optimus_cc_ext.techniques.gauge import Gauge
from optimus_cc_ext.techniques.schedule import Schedule
from optimus_cc_ext.techniques.selective_stage_compression import BucketReducer, stages_to_compress
from optimus_cc_ext.techniques.side_stream import SideStream
from optimus_cc_ext.traffic import Traffic

__all__ = ["Buckets", "Grid", "Session"]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """This rank's place in 3D parallelism, and the groups that Megatron made for it."""

    place: RankPlace
    stages: int
    chunks: int = 1
    """Model chunks per stage; more than one with interleaving."""

    data_parallel: int
    pipeline_group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None = None
    """The pair of first and last stage; None on the stages between."""

    timeout: timedelta | None = None
    """Megatron's limit on every wait; None: torch's default."""


class Buckets(Protocol):
    """A group of gradient buckets that is reduced together, as far as the session deals with it."""

    dense_bytes: int
    """What vanilla Megatron moves to reduce them, without a tied embedding, as in `traffic`."""

    tied_bytes: int
    """Of the gradient of a tied embedding among them."""

    overlapping: int
    """How many buckets are reduced while the backward pass goes on."""

    group: dist.ProcessGroup
    """The replicas that they are reduced over."""

    @property
    def compressed_bytes(self) -> int:
        """What is moved if they are compressed; where they cannot be, that of `dense_bytes`."""
        ...

    @property
    def matrices(self) -> Sequence[torch.Tensor]:
        """The gradients that can be compressed."""
        ...

    def compress(self) -> None:
        """Be compressed from now on."""


class _Stateful(Protocol):
    def commit(self, shrinkage: Mapping[str, float] | None = None) -> None: ...

    def rollback(self) -> None: ...

    def follow_loss_scale(self, factor: torch.Tensor) -> None: ...


@dataclass
class _Step:
    """Where in a training step this rank is."""

    iteration: int = 0
    open: bool = False
    """Whether the training loop announced the step, and will say how it ended."""

    measured: bool = False
    """Whether it is one that will be reported."""

    loss_scale: torch.Tensor | None = None
    """What the gradients of the last pass, and with them the residuals, were multiplied by; 0-dim. None: nothing."""

    passes: int = 0
    """Forward-backward passes of this step so far; more than one: it is being repeated."""


@dataclass
class Session:
    """State of one installation on one rank."""

    config: OptimusConfig
    layout: Layout | None = None
    """What the command line said about the run; None where no Megatron arguments exist."""

    # Links and buckets share no memory: on a GPU, buckets are reduced on a stream of their own. All buckets on the same
    # one, because they share theirs.
    link_compressor: LowRank = field(default_factory=fast_compressor)
    link_scratch: Scratch = field(default_factory=Scratch)
    bucket_compressor: LowRank = field(default_factory=fast_compressor)
    bucket_scratch: Scratch = field(default_factory=Scratch)
    bucket_stream: SideStream | None = None
    """Of overlapped reductions, once there is one."""

    traffic: Traffic = field(default_factory=Traffic)
    grid: Grid | None = None
    active: bool = False
    """Inside a training iteration. Forward-only passes leave it False, and then nothing is touched."""

    sending: SendingLink | None = None
    receiving: ReceivingLink | None = None
    embedding: FusedEmbeddingSync | None = None
    alone: dist.ProcessGroup | None = None
    """A group of this rank only; see `hooks.param_and_grad_buffer`."""

    buckets: list[Buckets] = field(default_factory=list)
    """All of this rank's, in the order in which Megatron made them."""

    reducers: list[BucketReducer] = field(default_factory=list)
    """Of those that we reduce, in the order in which they were made."""

    compressed_stages: frozenset[int] | None = None
    """Whose gradients are compressed; None: not decided yet."""

    link_gauge: Gauge = field(default_factory=Gauge)
    bucket_gauge: Gauge = field(default_factory=Gauge)
    usual_clipping: dict[str, UsualClipping] = field(default_factory=lambda: defaultdict(UsualClipping))
    """By gradient-norm group; equal on all ranks, because the norms are."""

    _expected: bool = False
    _step: _Step = field(default_factory=_Step)

    # -- placing ------------------------------------------------------------------------------------------------

    def place(self, grid: Grid, layout: Layout) -> None:
        """Take a place in the grid, once. Collective over all ranks of the run.

        Raises:
            FlagError: a technique cannot work on this layout.
            RanksDisagree: ranks run with different settings.
        """
        if self.grid is not None:
            return
        check_layout(self.config, layout)
        self.grid, self.layout = grid, layout
        self.compressed_stages = stages_to_compress(self.config, grid.stages)
        # Also where this rank has nothing switched on: another one may have, and would wait for it.
        places = self._agree(grid.place)
        self._make_links(grid)
        self._make_groups(grid, places)

    def _agree(self, place: RankPlace) -> list[RankPlace]:
        """Check that all ranks run with the same settings, and learn where each of them stands."""
        mine = (place, self.config, self.layout)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for other_place, config, layout in everyone:
            if (config, layout) != (self.config, self.layout):
                raise RanksDisagree(
                    f"rank {place.rank} and rank {other_place.rank} run with different settings: "
                    f"{self.config}, {self.layout} against {config}, {layout}. Start all ranks with the same flags."
                )
        return [other_place for other_place, _, _ in everyone]

    def _make_links(self, grid: Grid) -> None:
        if not self.config.compressed_backprop:
            return
        ranks, stage = dist.get_process_group_ranks(grid.pipeline_group), grid.place.stage

        before, after = (stage - 1) % grid.stages, (stage + 1) % grid.stages

        def plan(sending_stage: int, receiving_stage: int) -> LinkPlan:
            return LinkPlan(
                config=self.config,
                sending_stage=sending_stage,
                receiving_stage=receiving_stage,
                seed=self.config.compression_seed,
                state_dtype=self.state_dtype,
                force=self.config.force_compression,
            )

        # With interleaving the first stage sends gradients too: to an earlier chunk, on the last stage.
        if stage > 0 or grid.chunks > 1:
            self.sending = SendingLink(
                plan(stage, before),
                self.link_compressor,
                grid.place.rank,
                ranks[before],
                self.link_scratch,
                self.link_gauge,
            )
        if stage < grid.stages - 1 or grid.chunks > 1:
            self.receiving = ReceivingLink(
                plan(after, stage), self.link_compressor, grid.place.rank, ranks[after], self.link_gauge
            )

    def _make_groups(self, grid: Grid, places: list[RankPlace]) -> None:
        if self.config.fused_embedding_sync and self.layout is not None and self.layout.distributed_optimizer:
            if grid.embedding_group is not None:
                self.embedding = FusedEmbeddingSync(grid.embedding_group, sharded=True)
        elif self.config.fused_embedding_sync:
            for ranks in union_ranks(places, grid.stages):
                group = dist.new_group(ranks, timeout=grid.timeout, group_desc="OPTIMUS_CC_EMBEDDING")
                if grid.place.rank in ranks:
                    self.embedding = FusedEmbeddingSync(group)
        if self.config.fused_embedding_sync or self.config.dp_compression:
            # Local synchronisation: nobody else needs to take part, however many ranks there are.
            self.alone = dist.new_group(
                [grid.place.rank], timeout=grid.timeout, use_local_synchronization=True,
                group_desc="OPTIMUS_CC_ALONE",
            )  # fmt: skip

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state_dtype(self) -> torch.dtype:
        """What residuals and warm starts are kept in."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.config.compression_state_dtype]

    def expect(self, schedule: Schedule, gradient: torch.Tensor | None) -> bool:
        """Make room before the first iteration, whose gradients between stages will be like `gradient`.

        Returns:
            Whether this was the first call, and there is a state to speak of.
        """
        if self._expected:
            return False
        self._expected = True
        if self.sending is not None and gradient is not None:
            self.sending.expect(schedule, gradient)
        return self.config.compressed_backprop or self.config.dp_compression

    def state_nbytes(self) -> tuple[int, int]:
        """Bytes of residuals and factors on this rank: of its pipeline link, and of its gradient buckets."""
        return self.sending.state_nbytes if self.sending else 0, sum(reducer.state_nbytes for reducer in self.reducers)

    def _stateful(self) -> list[_Stateful]:
        return [*self.reducers] if self.sending is None else [*self.reducers, self.sending]

    # -- gradient buckets ---------------------------------------------------------------------------------------

    @property
    def compresses_this_stage(self) -> bool:
        """Whether selective stage compression covers the stage that this rank belongs to."""
        assert self.grid is not None, "the session has no place in the grid yet"
        return self.grid.place.stage in (self.compressed_stages or ())

    @property
    def stages_are_open(self) -> bool:
        """Whether it is still to be decided which stages compress their gradients."""
        return self.grid is not None and self.compressed_stages is None

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model as this one."""
        return self.buckets[0].group if self.buckets else None

    def choose_stages(self, stages: Collection[int]) -> None:
        """Decide which stages compress their gradients, between two iterations, on all ranks alike."""
        self.compressed_stages = frozenset(stages)
        if self.compresses_this_stage:
            for buckets in self.buckets:
                buckets.compress()

    def in_warmup(self) -> bool:
        """Whether this iteration comes before data-parallel compression begins."""
        return self._is_among_the_first(self.config.dp_compression_warmup)

    def _is_among_the_first(self, fraction: float) -> bool:
        """Whether this iteration belongs to the first `fraction` of the training."""
        train_iters = self.layout.train_iters if self.layout else None
        # Rounded: 0.29 of 100 is a little less than 29 in floating point.
        return self._step.iteration < round(fraction * (train_iters or 0))

    def add_reducer(self, make: Callable[[str], BucketReducer]) -> BucketReducer:
        """Make the reducer of one more bucket; `make` is given the bucket's share of the seed."""
        assert self.grid is not None, "the session has no place in the grid yet"
        reducer = make(f"stage {self.grid.place.stage} bucket {len(self.reducers)}")
        self.reducers.append(reducer)
        return reducer

    # -- steps and iterations -----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What this iteration's gradients and residuals were multiplied by, read from the device."""
        return 1.0 if self._step.loss_scale is None else float(self._step.loss_scale)

    def begin_step(self, iteration: int | None, *, measured: bool = False) -> None:
        """The training loop starts a step. `iteration` counts completed ones; None: we count ourselves.

        Args:
            measured: whether errors and times of this step will be asked for.
        """
        self._settle(applied=True)
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
        self._step.open = False

    @contextmanager
    def iteration(self, schedule: Schedule, loss_scale: torch.Tensor | None = None) -> Iterator[None]:
        """One forward-backward pass by `schedule`, whose loss is multiplied by the 0-dim tensor `loss_scale`.

        Raises:
            RanksDisagree: more or fewer gradient messages passed than the schedule has.
        """
        # In a step that the loop announced, a second pass repeats the first: what the first left must not count.
        self._settle(applied=not self._step.open)
        self._follow(loss_scale)
        self._measure(self._step.open and self._step.measured)
        compressing = not self._is_among_the_first(self.config.compressed_backprop_warmup)
        for link in (self.sending, self.receiving):
            if link is not None:
                link.begin_iteration(schedule, compressing=compressing)
        self._step.passes += 1
        self.active = True
        try:
            yield
        finally:
            self.active = False
        for link in (self.sending, self.receiving):
            if link is not None:
                link.end_iteration()

    def _follow(self, loss_scale: torch.Tensor | None) -> None:
        """Bring the residuals to this pass's loss scale, without asking the host what it is."""
        if loss_scale is not None and self._step.loss_scale is not None:
            factor = loss_scale / self._step.loss_scale
            for state in self._stateful():
                state.follow_loss_scale(factor)
        self._step.loss_scale = loss_scale

    def _measure(self, measured: bool) -> None:
        for gauge in (self.link_gauge, self.bucket_gauge):
            gauge.begin(measured)
        if self.sending is not None:
            self.sending.statistics.begin(measured and self.config.compression_error_statistics)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on from here, by technique: tensors (not copies), numbers and strings.

        In a step that the training loop announced, that is the state before the step; otherwise every pass counts.
        """
        if not self._step.open:
            self._settle(applied=True)
        state: dict[str, Any] = {"iteration": self._step.iteration}
        if self._step.loss_scale is not None:
            state["loss_scale"] = self._step.loss_scale
        if self.usual_clipping:
            state["usual_clipping"] = {group: usual.state for group, usual in self.usual_clipping.items()}
        if self.sending is not None:
            state["compressed_backprop"] = self.sending.state_dict()
        if self.config.dp_compression:
            state["dp_compression"] = {"buckets": [reducer.state_dict() for reducer in self._remembering]}
            if self.config.dp_compression_stages == "auto" and self.compressed_stages is not None:
                state["dp_compression"]["stages"] = sorted(self.compressed_stages)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank. A technique that is missing in it keeps its state.

        Raises:
            ValueError: it does not fit what is switched on here; then nothing is changed.
        """
        if reasons := self.mismatches(state):
            raise ValueError("; ".join(f"{technique}: {reason}" for technique, reason in reasons.items()))
        self._step = _Step(iteration=state["iteration"], loss_scale=state.get("loss_scale"))
        for group, usual in state.get("usual_clipping", {}).items():
            self.usual_clipping[group] = UsualClipping.from_state(usual)
        if self.sending is not None and "compressed_backprop" in state:
            self.sending.load_state_dict(state["compressed_backprop"])
        if "dp_compression" in state:
            for reducer, loaded in zip(self._remembering, state["dp_compression"]["buckets"], strict=True):
                reducer.load_state_dict(loaded)

    def mismatches(self, state: dict[str, Any]) -> dict[str, str]:
        """By technique: why `load_state_dict` would refuse `state`.

        Where the run that saved it had chosen its stages, they are taken over: its buckets are compared with ours.
        """
        if self.stages_are_open and (stages := state.get("dp_compression", {}).get("stages")) is not None:
            self.choose_stages(stages)
        reasons: dict[str, str] = {}
        if "compressed_backprop" in state:
            links = state["compressed_backprop"]
            if self.sending is None:
                reasons["compressed_backprop"] = "this rank sends no compressed messages"
            elif reason := self.sending.mismatch(links):
                reasons["compressed_backprop"] = reason
        if "dp_compression" in state:
            buckets = state["dp_compression"]["buckets"]
            if len(buckets) != len(self._remembering):
                reasons["dp_compression"] = f"{len(buckets)} gradient buckets where there are {len(self._remembering)}"
            for reducer, loaded in zip(self._remembering, buckets, strict=False):
                if reason := reducer.mismatch(loaded):
                    reasons.setdefault("dp_compression", reason)
        return reasons

    @property
    def _remembering(self) -> list[BucketReducer]:
        """The reducers that compress: the others, of the fused embedding, remember nothing."""
        return [reducer for reducer in self.reducers if reducer.matrices]

    def _settle(self, *, applied: bool, clip: Mapping[str, float] | None = None) -> None:
        """Decide about what the passes since the last decision left behind."""
        if not self._step.passes:
            return
        shrinkage = {}
        if applied and clip:
            shrinkage = {group: self.usual_clipping[group].shrinkage(c) for group, c in clip.items()}
        for state in self._stateful():
            if applied:
                state.commit(shrinkage)
            else:
                state.rollback()
        self._step.passes = 0
        self._step.iteration += 1 if applied else 0
