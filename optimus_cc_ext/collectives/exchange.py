"""Exchange over one flat tensor: sums in blocks of few bits, in one level or in two.

    1. encode a message for each shard, matrices in few bits and vectors dense;
       message d goes to rank d                                                 start: all-to-all
    2. own shard += sum of the messages that arrived from others, in fp32, in the order of the ranks
    3. encode that sum, matrices in 8 bits, and send it to all                  second_phase: all-gather
    4. decode all messages into their shards, the own one too                   finish

With the distributed optimizer step 2 is the last one, because its shards are the parts that are added up; unless whole
gradients are needed. No value is requantised to fewer than 8 bits, and none is requantised per hop: in step 2 the
errors of N ranks average out.

In two levels each of N nodes holds L ranks. The group `node` has the L ranks of one node; the group `rail` has N ranks,
one of each node, with the same place in their nodes. Rank d of all has place l in node n, for d = n L + l:

    0. the ranks of a node add up the tensor dense, and rank l gets its parts of the sum     start: reduce-scatters
       the ranks of a rail reduce these parts, by the steps above
    5. without the distributed optimizer: rank l sends its parts to its node, dense          finish: all-gathers

One level is L = 1: every node is one rank, the rail has all ranks, and steps 0 and 5 have nothing to do.

With the distributed optimizer the parts of rank l are the shards l, L + l, 2 L + l, .., and shard n L + l belongs to
the rank of the rail on node n: no value has to change its place. Without the distributed optimizer the parts are an
L-th of each run of values. All ranks of a rail decode the same messages, and each node copies the result, so replicas
are equal to the bit.

With several instances of the distributed optimizer the levels are Megatron's own: `node` is the group of one instance,
and `rail` the group between instances. The part of rank l is its shard, which all ranks of its rail need whole.

A sum over a pair of ranks can also be one all-gather whose messages are added up (`GatheredSum`). Without a codec,
native collectives do the same (`reducers.DenseReducer`, Megatron's own gather).

An `ExchangePlan` decides which rank adds up which part of a flat tensor, and computes the bytes. It knows shapes and
names of formats, so that doctor can use it before there is a tensor:

    plan = ExchangePlan(numel=..., coded=matrices, dense=vectors, dtype=torch.float32, ranks=8, sharded=True,
                        formats=Formats("int4", "int8"))
    sent(plan.legs()), plan.wire_bytes
    plan.bind(Groups(group), Tools(device=flat.device, codecs=codecs)).reduce(flat)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from optimus_cc_ext.collectives.calls import (
    PendingCollective,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatters,
    start_reduce_scatters_in_fp32,
    start_sum,
)
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Leg, Span, all_reduce, exchange, gather, reduce_scatter
from optimus_cc_ext.collectives.messages import AllGather, BlockCodecs, Formats, Tools, message_bytes
from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.collectives.ranges import Range, cut, dealt, views, within
from optimus_cc_ext.collectives.reducers import Reducer
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec, joined
from optimus_cc_ext.compressors.formats import BLOCK

_INSIDE = "gradient reduction inside a node"


@dataclass(frozen=True, eq=False, kw_only=True)
class ExchangePlan:
    """Plan of an exchange: which rank adds up which part of a flat tensor, and how many bytes that moves.

    With the distributed optimizer a rank adds up the shard that its optimizer reads. Otherwise blocks, and dense
    values, are dealt out evenly. No block crosses the end of a parameter: parameters that tensor-parallel ranks
    replicate lie between others that they do not replicate, and a block of both would have another scale on each rank.

    Args:
        numel: elements of the flat tensor.
        coded, dense: the ranges that are encoded, and those that are sent uncompressed, in any order.
        dtype: dtype of the flat tensor.
        ranks: number of ranks among which the tensor is summed.
        sharded: True if a rank needs only its own part of the sum.
        levels: the levels of the sum.
        place: the place of this rank in its node.
        in_fp32: True if the ranks of a node add up in fp32, and round their sum once.
        like: a plan whose layout, with the tables of the kernels, this plan shares if it is the same layout.
    """

    numel: int
    coded: Sequence[Range]
    dense: Sequence[Range] = ()
    dtype: torch.dtype
    ranks: int
    sharded: bool
    formats: Formats
    levels: Levels = ONE_LEVEL
    place: int = 0
    in_fp32: bool = False
    like: "ExchangePlan | None" = None

    def bind(self, groups: Groups, tools: Tools) -> "Exchange":
        """Make the reducer that follows this plan."""
        return Exchange(self, groups, tools)

    @property
    def members(self) -> int:
        """L: the ranks of each node, which add up dense; 1 in one level."""
        return self.levels.members if self.levels.two else 1

    @property
    def senders(self) -> int:
        """N: the ranks that exchange messages."""
        return self.ranks // self.members

    @property
    def scatters(self) -> bool:
        """True if every part of the sum is needed by the rank alone that adds it up."""
        return self.sharded and not self.levels.instances

    def gathers(self, whole: bool) -> bool:
        """Return whether sums are sent back in blocks; `whole` is the argument of `Reducer.start`."""
        return not self.scatters or (whole and self.members == 1)

    # -- ranges ---------------------------------------------------------------------------------------------------

    @cached_property
    def slabs(self) -> list[Range]:
        """Ranges that the ranks of a node add up; each range is cut evenly among the ranks."""
        members, nodes = self.members, self.senders
        if members == 1:
            return []
        if self.levels.instances:
            return [(0, self.numel)]
        if self.sharded:
            return [(node * self.numel // nodes, self.numel // nodes) for node in range(nodes)]
        sizes = ((start, length // (members * BLOCK) * BLOCK) for start, length in self._runs)
        return [(start, members * size) for start, size in sizes if size]

    @cached_property
    def remainders(self) -> list[Range]:
        """Ranges of values that are left over when a run is cut into blocks; all ranks sum them dense, in one level."""
        if self.sharded or self.members == 1:
            return []
        unit = self.members * BLOCK
        return [(start + length - length % unit, length % unit) for start, length in self._runs if length % unit]

    @property
    def _runs(self) -> list[Range]:
        return joined([*self.coded, *self.dense])

    @cached_property
    def parts(self) -> list[Range]:
        """Part of each slab whose sum over the node this rank holds."""
        lengths = ((start, length // self.members) for start, length in self.slabs)
        return [(start + self.place * length, length) for start, length in lengths]

    @cached_property
    def shards(self) -> tuple[list[list[Range]], list[list[Range]]]:
        """Encoded ranges that each rank of the rail adds up, and its dense ranges, by rank."""
        if self.scatters:
            size, own = self.numel // self.ranks, slice(self.place % self.members, None, self.members)
            return cut(self.coded, self.ranks, size)[own], cut(self.dense, self.ranks, size)[own]
        coded, dense = self.coded, self.dense
        if self.members > 1:
            coded, dense = within(coded, self.parts), within(dense, self.parts)
        return dealt(coded, self.senders, BLOCK), dealt(dense, self.senders, 1)

    @cached_property
    def layout(self) -> BlockLayout:
        """Layout of one message per rank. It takes O(D + P) steps to make, for D ranks and P parameters."""
        if self.like is not None and self.like.shards == self.shards:
            return self.like.layout
        return BlockLayout(*self.shards)

    def layout_of(self, rank: int, start: int = 0) -> BlockLayout:
        """Return the layout of one rank's message, padded to the common message length; offsets are relative to
        `start`. It is made once, and with it the tables of the kernels, for which the host waits.
        """
        if (rank, start) not in self._layouts:
            self._layouts[rank, start] = self.layout.of_message(rank, start)
        return self._layouts[rank, start]

    @cached_property
    def _layouts(self) -> dict[tuple[int, int], BlockLayout]:
        return {}

    @property
    def matrices(self) -> int:
        """Number of encoded ranges; if ranges are whole parameters, the number of encoded parameters."""
        return len(self.coded)

    # -- bytes ----------------------------------------------------------------------------------------------------

    @cached_property
    def message_bytes(self) -> tuple[int, int]:
        """Bytes of each message of gradients, and of each message of sums."""
        gradients, sums = (message_bytes(self.layout, format, self.dtype) for format in self.formats)
        return gradients, sums

    @property
    def summed_in_fp32(self) -> tuple[int, int]:
        """Number of values that a rank receives inside its node if it adds them up itself, in fp32, and number of
        values of its largest sum; zeros if the collective adds up.
        """
        if not self.in_fp32 or self.dtype == torch.float32 or not self.slabs:
            return 0, 0
        return sum(length for _, length in self.slabs), max(length for _, length in self.parts)

    @property
    def wire_bytes(self) -> int:
        """Bytes of memory for messages: of gradients in both directions; messages of sums use the same memory later,
        and sums inside a node use it before.
        """
        (gradients, sums), (received, total) = self.message_bytes, self.summed_in_fp32
        return max(self.senders * max(2 * gradients, sums), received * self.dtype.itemsize + total * 4)

    def legs(self, beside: int = 1, whole: bool = False) -> list[Leg]:
        """Return the collectives of one rank, whose node holds `beside` ranks; `whole` is that of `Reducer.start`."""
        size, span, (gradients, sums) = self.dtype.itemsize, Span(self.ranks, beside), self.message_bytes
        node, rail = span.inside(self.members), span.across(self.members)
        inside = [reduce_scatter(length * size, node) for _, length in self.slabs]
        legs = [*inside, exchange(gradients, rail)]
        if self.gathers(whole):
            legs.append(gather(sums, rail))
        if not self.sharded:
            legs += inside  # the sums are gathered inside the node
        elif whole and self.members > 1:
            legs.append(reduce_scatter(self.numel * size, node if self.levels.instances else span))
        return legs + [all_reduce(length * size, span) for _, length in self.remainders]

    def gather_leg(self, beside: int = 1) -> Leg:
        """Return the leg of an all-gather of messages in the format of gradients."""
        return gather(self.message_bytes[0], Span(self.ranks, beside))


class Exchange(Reducer):
    """Reducer that sums matrices in blocks of few bits, and vectors dense, in fp32, in the levels of its plan.

    A rank adds up the parts that the other ranks of its rail sent it, in the order of the ranks, and adds this sum to
    its own part, which is never encoded.
    """

    plan: ExchangePlan

    def __init__(self, plan: ExchangePlan, groups: Groups, tools: Tools) -> None:
        assert tools.codecs is not None or not plan.coded, "a plan in blocks of few bits needs codecs"
        codecs = tools.codecs or BlockCodecs(*map(Codec, plan.formats))  # dense values are the same in every format
        self.plan, self._groups, self._codecs, self._gauge = plan, groups, codecs, tools.gauge
        self._rank = groups.across.rank()
        memory, senders = tools.pool.take(plan.wire_bytes, tools.device), plan.senders
        (gradients, sums), (received, total) = plan.message_bytes, plan.summed_in_fp32
        self._outgoing, self._incoming = memory[: 2 * senders * gradients].view(2, senders, gradients)
        # Sums inside the node have ended when the exchange begins, and the exchange has when the gather does.
        self._total = memory[: 4 * total].view(torch.float32)
        self._received = memory[4 * total :][: received * plan.dtype.itemsize].view(plan.dtype)
        self._gather = AllGather(
            plan.layout_of(self._rank), groups.across, codecs.sums, memory[: senders * sums].view(senders, sums),
            "compressed gradient reduction (sums)",
        )  # fmt: skip
        self._flat: torch.Tensor | None = None
        self._whole = False
        self._messages: PendingCollective | None = None
        self._sums: list[PendingCollective] = []

    @torch.no_grad()
    def start(self, flat: torch.Tensor, whole: bool = False) -> None:
        """Add up inside the node, encode all parts but the own one, and send each to the rank that adds it up."""
        plan, codec, gauge = self.plan, self._codecs.gradients, self._gauge
        self._flat, self._whole = flat, whole
        self.encoded += plan.matrices
        remainders = views(flat, plan.remainders)
        self._sums = [start_sum(rest, self._groups.whole, "dense gradient reduction") for rest in remainders]
        if inside := self._inside(flat):
            assert self._groups.node is not None, "these groups have one level"
            if self._received.numel():
                start_reduce_scatters_in_fp32(inside, self._received, self._total, self._groups.node, _INSIDE).wait()
            else:
                start_reduce_scatters(inside, self._groups.node, _INSIDE).wait()
        with gauge.timed(flat.device):
            codec.encode(flat, plan.layout, self._outgoing, skipped=self._rank)
        if gauge.on:
            codec.errors(flat, plan.layout, self._outgoing, gauge.note, skipped=self._rank)
        if self._outgoing.numel():  # in two levels all parts that ranks exchange can be empty
            self._messages = start_all_to_all(
                self._incoming, self._outgoing, self._groups.across, "compressed gradient reduction (exchange)"
            )

    def _inside(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's part of each slab, and the slab; nothing in one level."""
        return list(zip(views(flat, self.plan.parts), views(flat, self.plan.slabs), strict=True))

    @property
    def sends_later(self) -> bool:
        return self.plan.gathers(self._whole)

    @torch.no_grad()
    def second_phase(self) -> None:
        """Wait for the exchange, add up the own part, and start the gather of sums if it is needed."""
        if self._flat is None or self._messages is None:
            return
        self._messages.wait()
        self._messages = None
        with self._gauge.timed(self._flat.device):
            self._incoming[self._rank].zero_()
            self._codecs.gradients.decode_add(self._incoming, self.plan.layout, self._rank, self._flat, onto=True)
            if self.sends_later:
                self._gather.encode(self._flat)
        if self.sends_later:
            self._gather.start()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the gather, and decode all sums; gather them inside the node, or whole gradients if asked to."""
        self.second_phase()
        if (flat := self._flat) is None:
            return
        if self._gather.wait():
            with self._gauge.timed(flat.device):
                self._codecs.sums.decode(self._gather.messages, self.plan.layout, flat)
        if not self.plan.sharded:
            for part, slab in self._inside(flat):
                assert self._groups.node is not None, "these groups have one level"
                self._sums.append(start_all_gather(slab, part, self._groups.node, _INSIDE))
        elif self._whole and self.plan.members > 1:
            start, length = self._groups.own_range(flat.numel())
            own, owners = flat[start : start + length], self._groups.owners
            self._sums.append(start_all_gather(flat, own, owners, "gather of whole gradients"))
        for pending in self._sums:
            pending.wait()
        self._flat, self._sums = None, []


class GatheredSum:
    """Sum of a flat tensor over few ranks: each sends all of it to all others, and adds up all messages, its own
    included.

    So all ranks have the same bits.

    Args:
        numel: elements of the tensor, which has `dtype`.
    """

    def __init__(self, numel: int, dtype: torch.dtype, groups: Groups, tools: Tools, purpose: str) -> None:
        assert tools.codecs is not None, "messages are encoded"
        self._layout, self._gauge, codec = BlockLayout.of_one(numel), tools.gauge, tools.codecs.gradients
        ranks, nbytes = groups.whole.size(), codec.message_bytes(self._layout, dtype)
        messages = tools.pool.take(ranks * nbytes, tools.device).view(ranks, nbytes)
        self._gather = AllGather(self._layout, groups.whole, codec, messages, purpose)

    @torch.no_grad()
    def reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor`, flat, in place; in fp32, in the order of the ranks."""
        gather = self._gather
        with self._gauge.timed(tensor.device):
            gather.encode(tensor)
        gather.note_errors(tensor, self._gauge)
        gather.start()
        gather.wait()
        with self._gauge.timed(tensor.device):
            gather.codec.decode_add(gather.messages, self._layout, 0, tensor)
