"""Selective stage compression (paper section 7): data-parallel gradients are compressed on the first stages only.

1F1B ends last on the first stages, so an iteration waits for their reduction. `bucket_plan` decides how a bucket is
reduced: as P and Q (`low_rank_gradients`), in blocks of few bits (`collectives/exchange.py`) or dense;
docs/develop/how-it-works.md has the order of the phases.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.calls import connect
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Bytes
from optimus_cc_ext.collectives.reducers import Reducer, Reduction, SideStream
from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.compressors.fast import fast_compressor
from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.config import DataParallelCompressionConfig, OptimusConfig
from optimus_cc_ext.config.classes import DP_GRADIENTS, PARAM_GATHER, TrafficClass
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.techniques.bucket import Bucket
from optimus_cc_ext.techniques.bucket_plan import GroupPlan, ReductionPlan
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.low_rank_gradients import LowRankReducer, LowRankTools
from optimus_cc_ext.techniques.state import state_dtype
from optimus_cc_ext.techniques.technique import Iteration, Technique


def stages_to_compress(config: DataParallelCompressionConfig, stages: int) -> frozenset[int]:
    """Return the stages, of 0 .. stages - 1, that compress their gradients."""
    first = config.dp_compression_stages if config.dp_compression_format != "dense" else 0
    return frozenset(range(first if isinstance(first, int) else stages))


class BucketGroup:
    """Group of gradient buckets that Megatron reduces together, with the reducers of its plan.

    Args:
        groups: the process groups of the replicas over which the buckets are reduced.
        side: the stream that reductions run on while the backward pass goes on; None: it waits for them.
        fused: reduces the tied embedding that the group holds; None: Megatron does, or there is none.
    """

    def __init__(
        self,
        technique: "SelectiveStageCompression",
        plan: GroupPlan,
        buckets: Sequence[Bucket],
        groups: Groups,
        *,
        side: SideStream | None,
        fused: FusedEmbeddingSync | None,
    ) -> None:
        self.plan, self.groups, self._buckets = plan, groups, buckets
        self._technique, self._side, self._fused = technique, side, fused
        self.overlapping = len(buckets) if side is not None else 0
        """Number of buckets that are reduced while the backward pass goes on."""

        if fused is not None:
            fused.make_room(self._tied_numel, buckets[0].record.dtype, buckets[0].device)
        self._made: dict[ReductionPlan, Reducer] = {}
        self._warmup = self._reducers([bucket.warmup for bucket in plan.buckets])
        self._compressed: list[Reducer] = []

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Gradients of all buckets as they are now, one dimension each."""
        return [bucket.gradients for bucket in self._buckets]

    def compress(self) -> None:
        """Compress the gradients that can be compressed, from now on, after the warm-up of compression."""
        self._compressed = self._reducers([bucket.compressed for bucket in self.plan.buckets])

    @property
    def reducers(self) -> list[Reducer]:
        """Reducers of all buckets in this iteration; empty if Megatron reduces them."""
        if self._fused is not None and self._fused.dense:
            return []
        compressing = self._compressed and not (self._technique.in_warmup or self._technique.dense)
        return self._compressed if compressing else self._warmup

    @property
    def leaves_out(self) -> bool:
        """True if the tied embedding is summed elsewhere in this iteration."""
        return self.plan.leaves_out and self._fused is not None and not self._fused.dense

    def release(self) -> None:
        """Drop the reducers of gradients that stay dense from now on."""
        self._compressed = []
        if self._fused is not None and self._fused.dense:
            self._warmup = []
        self._made = {plan: reducer for plan, reducer in self._made.items() if reducer in self._warmup}

    def start(self, reducers: Sequence[Reducer], flats: Sequence[torch.Tensor], *, whole: bool) -> Reduction:
        """Begin to reduce `flats`, all `gradients`, by `reducers`; `whole` is the argument of `Reducer.start`."""
        return Reduction(reducers, flats, self._technique.under_way, self._side, whole=whole)

    def bytes_by_class(self, reducers: Sequence[Reducer], *, whole: bool) -> dict[TrafficClass, Bytes]:
        """Return the bytes of a reduction by `reducers`, by class; `whole` is the argument of `Reducer.start`."""
        return self.plan.bytes_by_class(reducers is self._compressed, whole)

    @property
    def _tied_numel(self) -> int:
        """Length of the gradient that fused embedding synchronisation sums: the tied embedding's, or of this rank's
        shard of it.
        """
        record = next(bucket.record for bucket in self.plan.buckets if bucket.record.tied_numel)
        if self.plan.rules.sharded and record.is_all_tied:
            return self.groups.own_range(record.numel)[1]
        return record.tied_numel

    def _reducers(self, plans: Sequence[ReductionPlan | None]) -> list[Reducer]:
        """Make the reducers of all buckets, unless Megatron reduces them. The warm-up may have made some of them."""
        for bucket, plan, of_megatron in zip(self.plan.buckets, plans, self._buckets, strict=True):
            if plan is not None and plan not in self._made:
                fused = self._fused if bucket.fused else None
                self._made[plan] = self._technique.bind(
                    plan, of_megatron.device, self.groups, fused, together=self._side is not None or len(plans) > 1
                )
        return [self._made[plan] for plan in plans if plan is not None]


class SelectiveStageCompression(Technique):
    """Reductions of all gradient buckets of this rank, and the choice of the stages that compress theirs."""

    urgent = True

    def __init__(self, config: OptimusConfig, traffic: TrafficClass, ring: Ring | None = None) -> None:
        super().__init__(config, traffic, ring)
        self.compressor: LowRank = fast_compressor()
        self.codecs = self.new_codecs()
        """Codecs of a block format; None: low rank, with P and Q."""

        self.stage: int | None = None
        """Stage of this rank; None before it has a place."""

        self.compressed_stages = frozenset[int]()
        """Stages that compress their gradients; empty before this rank has a place."""

        self.in_warmup = False
        """True while gradients are reduced dense, in the first iterations."""

        self.buckets: list[BucketGroup] = []
        """Bucket groups of this rank, in the order in which Megatron made them."""

        self.reducers: list[Reducer] = []
        """Reducers of all buckets that we reduce, in the order in which they were made."""

        self.under_way: list[Reducer] = []
        """Reducers whose second phase has not begun; the reductions of this rank (`Reduction`) share the list."""

        self._stream: SideStream | None = None
        self._connected: list[dist.ProcessGroup] = []
        """Groups that have made their first collective (`connect`)."""

        self._single_rank: set[str] = set()
        """Kinds of gradients that stay dense because a group of one rank sends nothing."""

    def reduces(self, plan: GroupPlan) -> bool:
        """Return whether we reduce a group of this plan."""
        return plan.keeps_its_reducers or self._may_compress(plan)

    def _may_compress(self, plan: GroupPlan) -> bool:
        return plan.compresses and self.compresses_this_stage

    def note_single_rank(self, kept_dense: str | None) -> str | None:
        """Return the log line about gradients of this kind that stay dense in a group of one rank; once for a kind."""
        if kept_dense is None or kept_dense in self._single_rank:
            return None
        self._single_rank.add(kept_dense)
        return f"dense, because their data-parallel group is one rank and nothing is sent: {kept_dense}"

    def place(self, grid: Grid, layout: Layout, groups: NewGroups) -> None:
        """Take the stage, and get the single-rank group if gradients may be compressed."""
        self.take_stage(grid.place.stage, grid.stages)
        if self.config.is_on(self.traffic):
            self.alone = groups.alone()

    def take_stage(self, stage: int, stages: int) -> None:
        """Set this rank's stage, and the stages that compress."""
        self.stage, self.compressed_stages = stage, stages_to_compress(self.config, stages)

    def shrinks(self, like: torch.Tensor | None) -> bool | None:
        """Return whether any gradient can be compressed. Gradients of one-rank groups do not count: they have a log
        line of their own.
        """
        plans = [buckets.plan for buckets in self.buckets if buckets.plan.rules.encodes]
        return any(plan.compresses for plan in plans) if plans else None

    @property
    def unpaid(self) -> dict[str, tuple[int, int]]:
        """Numbers of buckets that stay dense because compression would send no fewer bytes, and of all buckets, by the
        name of their class.
        """
        plans = [buckets.plan for buckets in self.buckets]
        gradients = plans if self.compresses_this_stage else []
        number = sum(len(plan.buckets) for plan in plans)
        return {
            DP_GRADIENTS.name: (sum(plan.unpaid for plan in gradients), number),
            PARAM_GATHER.name: (sum(plan.ungathered for plan in plans), number),
        }

    @property
    def message_bytes(self) -> int:
        shared = max((reducer.shared_bytes for reducer in self.reducers), default=0)
        return shared + sum(reducer.nbytes for reducer in self.reducers)

    def release(self) -> None:
        """Drop the reducers and their intermediate results; those of a tied embedding only if that stays dense."""
        for buckets in self.buckets:
            buckets.release()
        self.reducers = [reducer for buckets in self.buckets for reducer in buckets.reducers]
        self.codecs = None
        self.scratch.clear()
        self.lane.keep([reducer.slices for reducer in self.reducers])

    def begin(self, this: Iteration) -> None:
        """Begin a pass, dense during the warm-up."""
        super().begin(this)
        # Reductions left by a failed pass would write into the gradients of this one.
        self.under_way.clear()
        self.lane.forget()
        self.in_warmup = this.is_among_the_first(self.config.dp_compression_warmup)

    @property
    def compresses_this_stage(self) -> bool:
        return self.stage in self.compressed_stages

    @property
    def expects_reductions(self) -> bool:
        """True if gradients of this rank are reduced by this technique, dense in a warm-up."""
        return self.compresses_this_stage and any(buckets.plan.rules.ranks > 1 for buckets in self.buckets)

    def add_group(
        self,
        plan: GroupPlan,
        buckets: Sequence[Bucket],
        groups: Groups,
        *,
        overlapped: bool,
        fused: FusedEmbeddingSync | None,
    ) -> BucketGroup:
        """Take over one more bucket group that Megatron made on this rank; `BucketGroup` has the arguments."""
        if self.reduces(plan):
            self._connect(plan, groups, buckets[0].device)
        side = self.side_stream(buckets[0].device) if overlapped else None
        made = BucketGroup(self, plan, buckets, groups, side=side, fused=fused if plan.tied_bytes else None)
        self.buckets.append(made)
        if self.compresses_this_stage:
            made.compress()
        return made

    def _connect(self, plan: GroupPlan, groups: Groups, device: torch.device) -> None:
        """Let the groups that reducers of this plan use make their first collective, each once."""
        used: dict[dist.ProcessGroup | None, bool] = {self.alone: False}
        if self._may_compress(plan) and self.codecs is not None:
            used[groups.across] = True
            if not groups.levels.instances:
                used[groups.node] = plan.rules.in_fp32
        for group, pairs in used.items():
            if group is not None and group not in self._connected:
                self._connected.append(group)
                connect(group, device, pairs=pairs)

    def bind(
        self,
        plan: ReductionPlan,
        device: torch.device,
        groups: Groups,
        fused: FusedEmbeddingSync | None,
        *,
        together: bool,
    ) -> Reducer:
        """Make the reducer of one more bucket.

        Args:
            device: the device of the bucket.
            fused: fused embedding synchronisation with its codecs and gauge, if the bucket is a tied embedding's own.
            together: True if other buckets are reduced meanwhile.
        """
        codecs, gauge = (self.codecs, self.gauge) if fused is None else (fused.bucket_codecs, fused.gauge)
        number = sum(isinstance(reducer, LowRankReducer) for reducer in self.reducers)
        tools = LowRankTools(
            device=device, codecs=codecs, gauge=gauge, lane=self.lane, together=together,
            compressor=self.compressor, config=self.config, states=self.states, name=f"bucket {number}",
            seed=self.config.compression_seed, salt=f"stage {self.stage} bucket {len(self.reducers)}",
            state_dtype=state_dtype(self.config.compression_state_dtype),
            scratch=self.scratch,  # all buckets share the scratch memory, and so one stream
        )  # fmt: skip
        self.reducers.append(plan.bind(groups, tools))
        return self.reducers[-1]

    def side_stream(self, device: torch.device) -> SideStream:
        """Return the stream for reductions while the backward pass goes on; it is made once."""
        if self._stream is None:
            self._stream = SideStream(device)
        return self._stream
