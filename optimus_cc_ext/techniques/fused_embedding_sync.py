"""Fused embedding synchronisation (paper section 6).

The tied word embedding exists on the first and on the last pipeline stage. Megatron reduces its gradient over the
data-parallel replicas of each stage, then over the pair of stages. Both sums together are one sum over the union of
those ranks, which moves V (2D - 1) / D bytes per rank instead of V (3D - 2) / D, for V bytes and D replicas.

With the distributed optimizer each replica reads only its shard of the reduced gradient. Then the replicas of a stage
reduce-scatter as usual, and the pair of stages sums that shard only: V (D - 1) / D + V / D instead of V (D - 1) / D +
V.

In a block format, an `Exchange` reduces over the union, or with the distributed optimizer over the replicas of each
stage. Then the pair of stages exchange their shards (`GatheredSum`), and each adds up both messages, so that both have
the same bits.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.calls import all_reduce_sum, connect
from optimus_cc_ext.collectives.exchange import Exchange, ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Leg, Span, all_reduce, gather
from optimus_cc_ext.collectives.messages import Formats, GatheredSum, Tools, message_bytes
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.slots import slot_bytes
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.technique import Technique


def union_ranks(places: Iterable[RankPlace], stages: int) -> list[list[int]]:
    """Return the ranks of each fused group: the first and the last stage's replicas, per tensor-parallel rank.

    Each tensor-parallel rank holds another slice of the vocabulary, so slices are never summed with each other. The
    order is the same on every rank, as creating process groups requires.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for place in places:
        if place.stage in (0, stages - 1):
            groups[place.tensor_rank].append(place.rank)
    return [sorted(groups[tensor_rank]) for tensor_rank in sorted(groups)]


_PURPOSE = "fused embedding synchronisation"


class FusedEmbeddingSync(Technique):
    """Fused embedding synchronisation on this rank: one collective of the ranks of the first and the last stage."""

    def __init__(self, config: OptimusConfig, traffic: TrafficClass, ring: Ring | None = None) -> None:
        super().__init__(config, traffic, ring)
        self._slot_bytes = slot_bytes(config.message_memory)
        self.codecs = self.new_codecs()
        """Codecs for the sum that this technique makes; None: it is dense."""

        self.bucket_codecs = self.new_codecs()
        """Codecs for the reducer of the embedding's bucket, which may run on another stream."""

        self.group: dist.ProcessGroup | None = None
        """Union of both stages' replicas; with the distributed optimizer the pair of stages. None: this rank takes no
        part.
        """

        self.sharded = False
        """True if the group sums the distributed optimizer's shards."""

        self.left_out = False
        """True if the last reduction over the replicas left the embedding out, so that it has still to be reduced."""

        self._pair = Span(2, beside=2)
        """The first and the last stage of this rank's pipeline."""

        self.groups: Groups | None = None
        """`group` with its levels; None: this rank takes no part."""

        self._connected = False
        """True once the union has made its first sum, if it sums dense gradients."""

        self._sums: dict[tuple[int, torch.dtype, torch.device], Exchange | GatheredSum] = {}
        """Sums in blocks, by length, dtype and device of the gradient: over the union, or over the pair, of a shard or
        of the whole embedding if Megatron needs that.
        """

    def place(self, grid: Grid, layout: Layout, groups: NewGroups) -> None:
        """Make or take the group of the embedding. The stages between have no group, but take part in naming the
        others'.
        """
        nodes = {place.rank: place.node.name for place in groups.places}
        pipeline = next(place.pipeline for place in groups.places if place.rank == grid.place.rank)
        ends = {nodes[rank] for rank in (*pipeline[:1], *pipeline[-1:])}
        self._pair = Span(2, beside=1 if len(ends) > 1 else 2)
        if not self.config.is_on(self.traffic) or any(place.frozen_embedding for place in groups.places):
            return
        self.alone = groups.alone()
        if self.left_dense:
            self.codecs = None
        if layout.distributed_optimizer:
            self.join(grid.embedding_group, sharded=True)
            return
        union = groups.make(union_ranks(groups.places, grid.stages), "OPTIMUS_CC_EMBEDDING")
        self.join(union, sharded=False)
        if union is not None:
            two = self.config.dp_compression_levels != "one" and self.codecs is not None
            self.groups = groups.in_levels(union, two=two)

    def join(self, group: dist.ProcessGroup | None, *, sharded: bool) -> None:
        """Set the group over which the embedding is summed."""
        self.group, self.sharded = group, sharded
        self.groups = None if group is None else Groups(group)

    def release(self) -> None:
        """Drop the sums in blocks, with their messages."""
        self._sums.clear()
        self.lane.keep([])
        self.codecs = self.bucket_codecs = None

    def takes_over(self, in_step: bool) -> bool:
        """Return whether this technique, and not Megatron, sums the embedding when gradients are finalised.

        A bucket that left the embedding out relies on the answer, whenever its gradients are finalised.

        Args:
            in_step: True if the gradients are finalised inside a training step.
        """
        return self.group is not None and (self.left_out or (self.sharded and in_step and not self.dense))

    def of_pair(self, gradient: torch.Tensor) -> Leg:
        """Return Megatron's sum of `gradient` over the first and the last stage."""
        return all_reduce(gradient.nbytes, self._pair)

    def legs(self, gradient: torch.Tensor) -> list[Leg]:
        """Return the collectives in which this technique sums `gradient`, an argument of `reduce`."""
        formats, groups = None if self.codecs is None else self.codecs.formats, self._joined
        union = None if self.sharded else Span(groups.whole.size(), groups.beside)
        return legs_of_sum(gradient.numel(), gradient.dtype, formats, self._pair, union, groups.levels)

    @property
    def message_bytes(self) -> int:
        return sum(each.nbytes for each in self._sums.values())

    def make_room(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the messages for the gradient of this length that `reduce` will get, and connect the groups that
        sum it, once.
        """
        groups, codecs, key = self._joined, self.codecs, (numel, dtype, device)
        tools = Tools(device=device, codecs=codecs, gauge=self.gauge, lane=self.lane)
        if codecs is None:
            if not self.sharded and not self._connected:
                connect(groups.whole, device, pairs=False)
                self._connected = True
        elif key not in self._sums and self.sharded:
            self._sums[key] = GatheredSum(numel, dtype, groups, tools, _PURPOSE)
        elif key not in self._sums:
            plan = plan_of_union(
                numel, dtype, groups.whole.size(), codecs.formats, groups.levels, groups.place, self._slot_bytes
            )
            connect(groups.across, device, pairs=True)
            if groups.node is not None:
                connect(groups.node, device, pairs=False)
            if plan.remainders:
                connect(groups.whole, device, pairs=False)
            self._sums[key] = plan.bind(groups, tools)

    @property
    def _joined(self) -> Groups:
        assert self.groups is not None, "this rank has no part in fused embedding synchronisation"
        return self.groups

    def reduce(self, gradient: torch.Tensor) -> None:
        """Sum the embedding's gradient, already scaled by 1/D, in place.

        Args:
            gradient: (vocabulary / T, hidden), the `main_grad` of the tied weight on one of T tensor-parallel ranks,
                not yet reduced over the D replicas; with the distributed optimizer its flat local shard, reduced over
                D.
        """
        self.left_out = False
        if self.codecs is None:
            all_reduce_sum(gradient, self._joined.whole, _PURPOSE)
            return
        kind = gradient.numel(), gradient.dtype, gradient.device
        self.make_room(*kind)
        self._sums[kind].reduce(gradient.view(-1))


def plan_of_union(
    numel: int, dtype: torch.dtype, ranks: int, formats: Formats, levels: Levels, place: int = 0,
    slot_bytes: int | None = None,
) -> ExchangePlan:  # fmt: skip
    """Plan the sum of a tied embedding over the replicas of both stages; `place` is this rank's in its node."""
    return ExchangePlan(
        numel=numel, coded=[(0, numel)], dtype=dtype, ranks=ranks, sharded=False, formats=formats, levels=levels,
        place=place, slot_bytes=slot_bytes,
    )  # fmt: skip


def legs_of_sum(
    numel: int, dtype: torch.dtype, formats: Formats | None, pair: Span, union: Span | None, levels: Levels
) -> list[Leg]:
    """Return the collectives of a rank in fused embedding synchronisation; with the distributed optimizer those of the
    pair of stages alone, because the sum over the replicas belongs to the embedding's bucket.

    Args:
        numel: values of the gradient; with the distributed optimizer those of a shard.
        formats: block formats; None: dense.
        union: the replicas of both stages; None: the pair of stages sums shards.
        levels: the levels of the union.
    """
    nbytes = numel * dtype.itemsize
    if union is None and formats is not None:
        return [gather(message_bytes(BlockLayout.of_one(numel), formats.gradients, dtype), pair)]
    if union is None or formats is None:
        return [all_reduce(nbytes, union or pair)]
    return plan_of_union(numel, dtype, union.ranks, formats, levels).legs(union.beside)
