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

Without a codec, native collectives do the same (`reducers.DenseReducer`, Megatron's own gather).

An `ExchangePlan` decides which rank adds up which part of a flat tensor, and computes the bytes. It knows shapes and
names of formats, so that doctor can use it before there is a tensor:

    plan = ExchangePlan(numel=..., coded=matrices, dense=vectors, dtype=torch.float32, ranks=8, sharded=True,
                        formats=Formats("int4", "int8"))
    sent(plan.legs())
    plan.bind(Groups(group), Tools(device=flat.device, codecs=codecs)).reduce(flat)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

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
from optimus_cc_ext.collectives.messages import AllGather, Formats, Tools, message_bytes
from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.collectives.ranges import Range, cut, dealt, portions, views, within
from optimus_cc_ext.collectives.reducers import Reducer
from optimus_cc_ext.collectives.ring import Slice
from optimus_cc_ext.compressors.blocks import AT_ONCE, BlockLayout, joined
from optimus_cc_ext.compressors.formats import BLOCK, format_named, section_bytes
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.slots import SLOTS, slices

_INSIDE = "gradient reduction inside a node"

_GRAIN = 64
"""Blocks between two places at which a range can be cut, if its last blocks allow that."""


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
        slot_bytes: the most bytes of messages under way at once, in both directions; None: no limit.
        like: a plan whose layouts, with the tables of the kernels, this plan shares if they are the same.
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
    slot_bytes: int | None = None
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
    def layouts(self) -> tuple[BlockLayout, ...]:
        """Layouts of one message per rank, for each slice. They take O(D + P) steps to make, for D ranks and P
        parameters.

        A slice has a portion of every shard. Shards are dealt before they are cut, and cut where the encoder computes
        the same bits as for one message (`_unit`).
        """
        if self.like is not None and self.like.shards == self.shards and self.like._cut == self._cut:
            return self.like.layouts
        count, unit = self._cut
        if count == 1:
            return (BlockLayout(*self.shards),)
        coded = [portions(joined(shard, BLOCK), count, BLOCK, partial(_unit, unit)) for shard in self.shards[0]]
        dense = [portions(joined(shard), count) for shard in self.shards[1]]
        return tuple(map(BlockLayout, zip(*coded, strict=True), zip(*dense, strict=True)))

    @cached_property
    def _cut(self) -> tuple[int, int]:
        """Number of slices, and the largest distance between two possible cuts of a shard, in blocks.

        Raises:
            FlagError: not even one block of each rank fits into a slot.
        """
        blocks, values = (
            max((sum(-(-length // size) for _, length in shard) for shard in shards), default=0)
            for shards, size in zip(self.shards, (BLOCK, 1), strict=True)
        )
        if self.slot_bytes is None or self._slot(blocks, values) <= self.slot_bytes:
            return 1, 1
        if (least := self._slot(1, 1)) > self.slot_bytes:
            needed = SLOTS * least / 1e6
            reason = f"messages of one block to each of {self.senders} ranks need {needed:.2f} MB"
            raise FlagError("--message-memory", reason, f"Give at least {math.ceil(needed)}")
        return slices(self._slot, blocks, values, self.slot_bytes, AT_ONCE)

    def _slot(self, blocks: int, values: int) -> int:
        """Return the bytes of messages of so many blocks and dense values: of gradients in both directions, and later
        of sums.
        """
        gradients, sums = (
            section_bytes(blocks, values, format_named(format).code_bytes, self.dtype.itemsize)[2]
            for format in self.formats
        )
        return self.senders * max(2 * gradients, sums)

    @property
    def slice_bytes(self) -> list[int]:
        """Bytes of memory for the messages of each slice, between this rank and all others."""
        return [self._slot(layout.blocks, layout.dense_numel) for layout in self.layouts]

    @property
    def gather_bytes(self) -> list[int]:
        """Bytes of memory for the messages of all ranks, of each slice, if messages in the format of gradients are
        gathered.
        """
        format = self.formats.gradients
        return [self.senders * message_bytes(layout, format, self.dtype) for layout in self.layouts]

    def own_layouts(self, rank: int, starts: tuple[int, ...] | None = None) -> list[BlockLayout]:
        """Return the layouts of one rank's messages, by slice, padded to the common message lengths. They are made
        once, and with them the tables of the kernels, for which the host waits.

        Args:
            starts: for each slice, the place in the flat tensor to which offsets are relative; None: its start.
        """
        key = rank, starts or (0,) * len(self.layouts)
        if key not in self._own_layouts:
            self._own_layouts[key] = [
                layout.of_message(rank, start) for layout, start in zip(self.layouts, key[1], strict=True)
            ]
        return self._own_layouts[key]

    @cached_property
    def _own_layouts(self) -> dict[tuple[int, tuple[int, ...]], list[BlockLayout]]:
        return {}

    @property
    def matrices(self) -> int:
        """Number of encoded ranges; if ranges are whole parameters, the number of encoded parameters."""
        return len(self.coded)

    # -- bytes ----------------------------------------------------------------------------------------------------

    @cached_property
    def message_bytes(self) -> tuple[int, int]:
        """Bytes that go to each rank in messages of gradients, and in messages of sums, in all slices."""
        gradients, sums = (
            sum(message_bytes(layout, format, self.dtype) for layout in self.layouts) for format in self.formats
        )
        return gradients, sums

    @property
    def summed_in_fp32(self) -> tuple[int, int]:
        """Number of values that a rank receives inside its node if it adds them up itself, in fp32, and number of
        values of its largest sum; zeros if the collective adds up.
        """
        if not self.in_fp32 or self.dtype == torch.float32 or not self.slabs:
            return 0, 0
        return sum(length for _, length in self.slabs), max(length for _, length in self.parts)

    def legs(self, beside: int = 1, whole: bool = False) -> list[Leg]:
        """Return the collectives of one rank, whose node holds `beside` ranks; `Reducer.start` explains `whole`."""
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

    def gather_leg(self, beside: int = 1, nbytes: int | None = None) -> Leg:
        """Return the leg of an all-gather of messages in the format of gradients, of `nbytes` if these are given."""
        return gather(self.message_bytes[0] if nbytes is None else nbytes, Span(self.ranks, beside))


def _unit(most: int, blocks: int) -> int:
    """Return the number of blocks at whose multiples a range of `blocks` is cut, at most `most`.

    The encoder takes up to `AT_ONCE` blocks at once. torch's matrix product rounds fewer than 4 rows in another way, so
    no cut may leave the last 1 to 3 blocks of a range alone, or join them to others.
    """
    return most if 0 < blocks % _GRAIN < 4 else min(most, _GRAIN)


class Exchange(Reducer):
    """Reducer that sums matrices in blocks of few bits, and vectors dense, in fp32, in the levels of its plan.

    A rank adds up the parts that the other ranks of its rail sent it, in the order of the ranks, and adds this sum to
    its own part, which is never encoded.
    """

    plan: ExchangePlan

    def __init__(self, plan: ExchangePlan, groups: Groups, tools: Tools) -> None:
        assert tools.codecs is not None, "a plan in blocks of few bits needs codecs"
        self.plan, self.groups, self.codecs, self.gauge = plan, groups, tools.codecs, tools.gauge
        self._lane, self.rank = tools.lane, groups.across.rank()
        self.slices: list[_SumSlice] = [
            _SumSlice(self, *each, tools.device)
            for each in zip(plan.layouts, plan.own_layouts(self.rank), plan.slice_bytes, strict=True)
        ]
        self._lane.reserve(self.slices, together=tools.together)
        received, total = plan.summed_in_fp32
        self._received = torch.empty(received, dtype=plan.dtype, device=tools.device)
        self._total = torch.empty(total, dtype=torch.float32, device=tools.device)
        self.flat: Any = None  # the bucket, from `start` to `finish`
        self._whole = False
        self._sums: list[PendingCollective] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory for sums inside the node; messages between nodes use the ring."""
        return self._received.nbytes + self._total.nbytes

    @torch.no_grad()
    def start(self, flat: torch.Tensor, whole: bool = False) -> None:
        """Add up inside the node, encode all parts but the own one, and send each to the rank that adds it up."""
        plan = self.plan
        self.flat, self._whole = flat, whole
        self.encoded += plan.matrices
        remainders = views(flat, plan.remainders)
        self._sums = [start_sum(rest, self.groups.whole, "dense gradient reduction") for rest in remainders]
        if inside := self._inside(flat):
            assert self.groups.node is not None, "these groups have one level"
            if self._received.numel():
                start_reduce_scatters_in_fp32(inside, self._received, self._total, self.groups.node, _INSIDE).wait()
            else:
                start_reduce_scatters(inside, self.groups.node, _INSIDE).wait()
        self._lane.submit(self.slices)

    def _inside(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's part of each slab, and the slab; nothing in one level."""
        return list(zip(views(flat, self.plan.parts), views(flat, self.plan.slabs), strict=True))

    @property
    def sends_later(self) -> bool:
        return self.plan.gathers(self._whole)

    @torch.no_grad()
    def second_phase(self) -> None:
        """Add up the own part of each slice whose messages are under way, and start the gather of sums."""
        for each in self.slices:
            each.add_up()

    @torch.no_grad()
    def finish(self) -> None:
        """End all slices. Then gather the sums inside the node, or whole gradients if `start` was asked for them."""
        self._lane.end(self.slices)
        if (flat := self.flat) is None:
            return
        if not self.plan.sharded:
            for part, slab in self._inside(flat):
                assert self.groups.node is not None, "these groups have one level"
                self._sums.append(start_all_gather(slab, part, self.groups.node, _INSIDE))
        elif self._whole and self.plan.members > 1:
            start, length = self.groups.own_range(flat.numel())
            own, owners = flat[start : start + length], self.groups.owners
            self._sums.append(start_all_gather(flat, own, owners, "gather of whole gradients"))
        for pending in self._sums:
            pending.wait()
        self.flat, self._sums = None, []


class _SumSlice(Slice):
    """Slice of an exchange: steps 1 to 4 for a portion of every shard.

    Args:
        layout: layout of the slice's messages; `own` is that of this rank's message.
    """

    def __init__(
        self, exchange: Exchange, layout: BlockLayout, own: BlockLayout, nbytes: int, device: torch.device
    ) -> None:
        super().__init__(nbytes, device)
        self._exchange, self._layout, plan = exchange, layout, exchange.plan
        self._ranks, self._bytes = plan.senders, [message_bytes(layout, each, plan.dtype) for each in plan.formats]
        self._gather = AllGather(
            own, exchange.groups.across, exchange.codecs.sums, "compressed gradient reduction (sums)"
        )
        self._incoming = self._sums = self._own_sums = torch.empty(0, dtype=torch.uint8)
        self._messages: PendingCollective | None = None

    def cut(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the messages that are sent, those that arrive, and the sums, for which the exchange has ended."""
        ranks, (gradients, of_sums) = self._ranks, self._bytes
        outgoing, incoming = memory[: 2 * ranks * gradients].view(2, ranks, gradients)
        sums = memory[: ranks * of_sums].view(ranks, of_sums)
        return outgoing, incoming, sums, sums[self._exchange.rank]

    @torch.no_grad()
    def begin(self, *views: torch.Tensor) -> None:
        """Encode all parts but the own one, and send each to the rank that adds it up."""
        exchange, (outgoing, self._incoming, self._sums, self._own_sums) = self._exchange, views
        flat, rank, codec = exchange.flat, exchange.rank, exchange.codecs.gradients
        with exchange.gauge.timed(self.device):
            codec.encode(flat, self._layout, outgoing, skipped=rank)
        if exchange.gauge.on:
            codec.errors(flat, self._layout, outgoing, exchange.gauge.note, skipped=rank)
        if outgoing.numel():  # in two levels all parts that ranks exchange can be empty
            self._messages = start_all_to_all(
                self._incoming, outgoing, exchange.groups.across, "compressed gradient reduction (exchange)"
            )

    def add_up(self) -> None:
        """Wait for the exchange, add up the own part, and start the gather of sums if it is needed; once."""
        if self._messages is None:
            return
        exchange, pending, self._messages = self._exchange, self._messages, None
        pending.wait()
        with exchange.gauge.timed(self.device):
            self._incoming[exchange.rank].zero_()
            exchange.codecs.gradients.decode_add(self._incoming, self._layout, exchange.rank, exchange.flat, onto=True)
            if exchange.sends_later:
                self._gather.encode(exchange.flat, self._own_sums)
        if exchange.sends_later:
            self._gather.start(self._sums, self._own_sums)

    @torch.no_grad()
    def end(self) -> None:
        """Add up the own part, and decode the sums if they are gathered."""
        self.add_up()
        if self._exchange.sends_later and self._gather.wait():
            exchange = self._exchange
            with exchange.gauge.timed(self.device):
                exchange.codecs.sums.decode(self._sums, self._layout, exchange.flat)
