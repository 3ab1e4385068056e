"""Gradient buckets in two levels: exact sums inside a node, and sums of nodes in blocks of few bits between nodes.

Each of N nodes holds L ranks of a group of replicas. The group `node` has the L ranks of one node; the group `rail` has
N ranks, one of each node, with the same place in their nodes. Rank d of all replicas has place l in node n, for
d = n L + l:

    1. the ranks of a node add up the bucket dense, and rank l gets its parts of the sum     start: reduce-scatters
    2. the ranks of a rail reduce these parts in blocks of few bits (`BlockReducer`)         start, second_phase
    3. without the distributed optimizer: rank l sends its parts to its node, dense          finish: all-gather

With the distributed optimizer the parts of rank l are the shards l, L + l, 2 L + l, .., and shard n L + l belongs to
the rank of the rail on node n: no value has to change its place. Without the distributed optimizer the parts are an
L-th of each run of values. All ranks of a rail decode the same messages, and each node copies the result, so replicas
are equal to the bit.

With several instances of the distributed optimizer the levels are Megatron's own: `node` is the group of one instance,
and `rail` the group between instances. The part of rank l is its shard, which all ranks of its rail need whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from optimus_cc_ext.compressors.blocks import joined
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.metrics.traffic import all_reduce_bytes, leaving_ring, reduce_scatter_bytes
from optimus_cc_ext.techniques.collective import (
    PendingCollective,
    start_all_gather,
    start_reduce_scatters,
    start_reduce_scatters_in_fp32,
    start_sum,
)
from optimus_cc_ext.techniques.exchange import BlockCodecs, ExchangePlan, Formats, Groups, MessagePool, Range
from optimus_cc_ext.techniques.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.techniques.reducers import BlockReducer, Reducer

__all__ = ["TwoLevelPlan", "TwoLevelReducer", "block_plan", "block_reducer", "sent_alone"]

_INSIDE = "gradient reduction inside a node"


@dataclass(frozen=True, eq=False, kw_only=True)
class TwoLevelPlan:
    """The plan of one bucket in two levels: the ranges of each step, and the bytes that one rank sends.

    Args:
        numel: elements of the bucket.
        coded, dense: the ranges that are encoded between nodes, and the ranges that are sent dense, in any order.
        levels: numbers of nodes and of their members.
        place: the place of this rank in its node.
        sharded: True if a rank needs only its own shard of the sum (the distributed optimizer).
        in_fp32: True if the ranks of a node add up in fp32, and round their sum once.
    """

    numel: int
    coded: Sequence[Range]
    dense: Sequence[Range] = ()
    dtype: torch.dtype
    levels: Levels
    place: int
    sharded: bool
    formats: Formats
    in_fp32: bool = False

    @cached_property
    def slabs(self) -> list[Range]:
        """Ranges that the ranks of a node add up; each range is cut evenly among the ranks."""
        members, nodes = self.levels.members, self.levels.nodes
        if self.levels.instances:
            return [(0, self.numel)]
        if self.sharded:
            return [(node * self.numel // nodes, self.numel // nodes) for node in range(nodes)]
        sizes = ((start, length // (members * BLOCK) * BLOCK) for start, length in self._runs)
        return [(start, members * size) for start, size in sizes if size]

    @cached_property
    def remainders(self) -> list[Range]:
        """Ends of runs that cannot be cut evenly into blocks: all replicas sum them dense, in one level."""
        if self.sharded:
            return []
        unit = self.levels.members * BLOCK
        return [(start + length - length % unit, length % unit) for start, length in self._runs if length % unit]

    @property
    def _runs(self) -> list[Range]:
        return joined([*self.coded, *self.dense])

    @cached_property
    def parts(self) -> list[Range]:
        """Part of each slab whose sum over the node this rank holds."""
        lengths = ((start, length // self.levels.members) for start, length in self.slabs)
        return [(start + self.place * length, length) for start, length in lengths]

    @cached_property
    def across(self) -> ExchangePlan:
        """Plan of the exchange between nodes."""
        nodes, members = self.levels.nodes, self.levels.members
        if self.sharded and not self.levels.instances:
            return ExchangePlan(
                numel=self.numel, coded=self.coded, dense=self.dense, dtype=self.dtype, ranks=nodes, sharded=True,
                formats=self.formats, parts=nodes * members,
                owned=range(self.place, nodes * members, members),
            )  # fmt: skip
        return ExchangePlan(
            numel=self.numel, coded=_within(self.coded, self.parts), dense=_within(self.dense, self.parts),
            dtype=self.dtype, ranks=nodes, sharded=False, formats=self.formats,
        )  # fmt: skip

    @property
    def matrices(self) -> int:
        return len(self.coded)

    @property
    def wire_bytes(self) -> int:
        """Bytes of memory for messages, and for sums in fp32."""
        received, total = self.summed_in_fp32
        return self.across.wire_bytes + received * self.dtype.itemsize + total * 4

    @property
    def summed_in_fp32(self) -> tuple[int, int]:
        """Number of values that a rank receives inside its node if it adds them up itself, in fp32, and number of
        values of its largest sum; zeros if the collective adds up.
        """
        if not self.in_fp32 or self.dtype == torch.float32:
            return 0, 0
        return sum(length for _, length in self.slabs), max(length for _, length in self.parts)

    @property
    def inside_bytes(self) -> int:
        """Bytes that one rank sends inside its node: for the sums, and without the distributed optimizer to gather
        them.
        """
        size, members = self.dtype.itemsize, self.levels.members
        summed = sum(reduce_scatter_bytes(length * size, members) for _, length in self.slabs)
        return summed * (1 if self.sharded else 2)

    def sent_bytes(self, whole: bool = False) -> int:
        """Return the bytes that one rank sends, inside its node and to others; `whole` is the argument of
        `Reducer.start`.
        """
        size, ranks = self.dtype.itemsize, self.levels.members * self.levels.nodes
        dense = sum(all_reduce_bytes(length * size, ranks) for _, length in self.remainders)
        if self.sharded and whole:
            dense = reduce_scatter_bytes(self.numel * size, ranks)
        return self.inside_bytes + self.across.sent_bytes() + dense

    def leaving_bytes(self, beside: int, whole: bool = False) -> float:
        """Return the bytes of one rank that leave its node, which holds `beside` ranks of the group."""
        members = self.levels.members
        if self.levels.instances:
            across = self.across.leaving_bytes(max(1, beside // members))
            return across + leaving_ring(self.inside_bytes, members, min(beside, members))
        ranks = self.levels.members * self.levels.nodes
        rings = self.sent_bytes(whole) - self.inside_bytes - self.across.sent_bytes()
        return self.across.leaving_bytes(1) + leaving_ring(rings, ranks, beside)


def block_plan(
    numel: int,
    coded: Sequence[Range],
    dense: Sequence[Range],
    dtype: torch.dtype,
    ranks: int,
    *,
    sharded: bool,
    formats: Formats,
    levels: Levels,
    place: int = 0,
    in_fp32: bool = False,
) -> ExchangePlan | TwoLevelPlan:
    """Plan a sum in blocks of few bits over a group of ranks, in the levels that its nodes allow."""
    if levels.two:
        return TwoLevelPlan(
            numel=numel, coded=coded, dense=dense, dtype=dtype, levels=levels, place=place, sharded=sharded,
            formats=formats, in_fp32=in_fp32,
        )  # fmt: skip
    return ExchangePlan(
        numel=numel, coded=coded, dense=dense, dtype=dtype, ranks=ranks, sharded=sharded, formats=formats
    )  # fmt: skip


@lru_cache
def sent_alone(
    numel: int,
    dtype: torch.dtype,
    ranks: int,
    sharded: bool,
    formats: Formats,
    whole: bool = False,
    levels: Levels = ONE_LEVEL,
) -> int:
    """Return the bytes that one rank sends to reduce one encoded parameter in an exchange of its own."""
    bucket = -(-numel // ranks) * ranks
    plan = block_plan(
        bucket, [(0, numel)], (), dtype, ranks, sharded=sharded, formats=formats, levels=levels
    )  # fmt: skip
    return plan.sent_bytes(whole)


class TwoLevelReducer(Reducer):
    """Reducer of a bucket in two levels: exact sums inside each node, and sums of nodes in blocks of few bits.

    Args:
        device: the device of the bucket, which is in fp32 or bf16.
        groups: groups of two levels.
        codecs, pool, gauge: the arguments of `BlockReducer`, for sums of nodes.
    """

    def __init__(
        self,
        plan: TwoLevelPlan,
        device: torch.device,
        groups: Groups,
        codecs: BlockCodecs,
        *,
        pool: MessagePool | None = None,
        gauge: Gauge | None = None,
    ) -> None:
        assert groups.node is not None and groups.rail is not None, "these groups have one level"
        self.plan, self._whole_group, self._node = plan, groups.whole, groups.node
        self._across = BlockReducer(plan.across, device, Groups(groups.rail), codecs, pool=pool, gauge=gauge)
        pool, sizes = pool or MessagePool(), plan.summed_in_fp32
        self._received, self._total = (
            pool.take(size * dtype.itemsize, device).view(dtype)
            for size, dtype in zip(sizes, (plan.dtype, torch.float32), strict=True)
        )
        self._flat: torch.Tensor | None = None
        self._inside: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Between `start` and `finish`, this rank's part of each slab, and the slab."""

        self._sums: list[PendingCollective] = []
        self._whole = False

    @torch.no_grad()
    def start(self, flat: torch.Tensor, whole: bool = False) -> None:
        """Add up inside the node, and start the exchange of the sums between nodes."""
        plan = self.plan
        self._flat, self._whole = flat, whole and plan.sharded
        self._inside = list(zip(_views(flat, plan.parts), _views(flat, plan.slabs), strict=True))
        self.encoded += plan.matrices
        remainders = _views(flat, plan.remainders)
        self._sums = [start_sum(rest, self._whole_group, "dense gradient reduction") for rest in remainders]
        if self._received.numel():
            parts, memory = self._inside, (self._received, self._total)
            start_reduce_scatters_in_fp32(parts, *memory, self._node, _INSIDE).wait()
        else:
            start_reduce_scatters(self._inside, self._node, _INSIDE).wait()
        self._across.start(flat)

    @property
    def sends_later(self) -> bool:
        return self._across.sends_later

    def second_phase(self) -> None:
        """Add up the nodes' sums, and without the distributed optimizer send the results to the other nodes."""
        self._across.second_phase()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the exchange between nodes; gather the results inside the node, or whole gradients if asked to."""
        if self._flat is None:
            return
        self._across.finish()
        if not self.plan.sharded:
            self._sums += [start_all_gather(slab, part, self._node, _INSIDE) for part, slab in self._inside]
        elif self._whole:
            own = self._flat.view(self._whole_group.size(), -1)[self._whole_group.rank()]
            self._sums.append(start_all_gather(self._flat, own, self._whole_group, "gather of whole gradients"))
        for pending in self._sums:
            pending.wait()
        self._flat, self._inside, self._sums = None, [], []


def block_reducer(
    plan: ExchangePlan | TwoLevelPlan,
    device: torch.device,
    groups: Groups,
    codecs: BlockCodecs,
    *,
    pool: MessagePool,
    gauge: Gauge,
) -> BlockReducer | TwoLevelReducer:
    """Make the reducer of a bucket on `device`, in one level or in two, as `plan` has it."""
    if isinstance(plan, TwoLevelPlan):
        return TwoLevelReducer(plan, device, groups, codecs, pool=pool, gauge=gauge)
    return BlockReducer(plan, device, groups, codecs, pool=pool, gauge=gauge)


def _views(flat: torch.Tensor, ranges: Sequence[Range]) -> list[torch.Tensor]:
    return [flat[start : start + length] for start, length in ranges]


def _within(ranges: Sequence[Range], parts: Sequence[Range]) -> list[Range]:
    """Return the parts of `ranges` that lie in `parts`; both lists are short, and in any order."""
    cuts = (
        (max(start, first), min(start + length, first + size))
        for start, length in ranges
        for first, size in parts
    )  # fmt: skip
    return [(start, end - start) for start, end in cuts if start < end]
