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

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from optimus_cc_ext.collectives.calls import (
    PendingCollective,
    reduce_scatters_in_fp32,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatters,
    start_sum,
)
from optimus_cc_ext.collectives.division import Division
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Leg, Span, all_reduce, exchange, gather, reduce_scatter
from optimus_cc_ext.collectives.messages import AllGather, Tools, message_bytes
from optimus_cc_ext.collectives.ranges import views
from optimus_cc_ext.collectives.reducers import Reducer
from optimus_cc_ext.collectives.ring import Slice
from optimus_cc_ext.compressors.blocks import BlockLayout

_INSIDE = "gradient reduction inside a node"


@dataclass(frozen=True, eq=False, kw_only=True)
class ExchangePlan(Division):
    """Plan of an exchange: which rank adds up which part of a flat tensor, and how many bytes that moves."""

    in_fp32: bool = False
    """True if gradients of 16 bits are summed over a node in fp32 and rounded once."""

    def bind(self, groups: Groups, tools: Tools) -> "Exchange":
        """Make the reducer that follows this plan."""
        return Exchange(self, groups, tools)

    def gathers(self, whole: bool) -> bool:
        """Return whether sums are sent back in blocks; `whole` is the argument of `Reducer.start`."""
        return not self.scatters or (whole and self.members == 1)

    @cached_property
    def message_bytes(self) -> tuple[int, int]:
        """Bytes that go to each rank in messages of gradients, and in messages of sums, in all slices."""
        gradients, sums = (
            sum(message_bytes(layout, format, self.dtype) for layout in self.layouts) for format in self.formats
        )
        return gradients, sums

    @cached_property
    def summed_in_fp32(self) -> int:
        """Number of values that a rank sums over its node at once, in fp32; 0 if the collective adds up."""
        if not self.in_fp32 or self.dtype == torch.float32 or not self.slabs:
            return 0
        longest = max(length for _, length in self.parts)
        return longest if self.slot_bytes is None else max(1, min(longest, self.slot_bytes // self._bytes_in_fp32))

    @property
    def inside_bytes(self) -> int:
        """Bytes of memory for these sums."""
        return self.summed_in_fp32 * self._bytes_in_fp32

    @property
    def _bytes_in_fp32(self) -> int:
        """Bytes in which a rank adds up one value in fp32: those that it receives, and their sum."""
        return self.members * self.dtype.itemsize + 4

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
        self._scratch = tools.scratch
        self.flat: Any = None  # the bucket, from `start` to `finish`
        self._whole = False
        self._sums: list[PendingCollective] = []

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory for sums inside the node; messages between nodes use the ring."""
        return self.plan.inside_bytes

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
            if values := plan.summed_in_fp32:
                received = self._scratch.take("received", (plan.members * values,), flat.dtype, flat.device)
                total = self._scratch.take("summed in fp32", (values,), torch.float32, flat.device)
                reduce_scatters_in_fp32(inside, received, total, self.groups.node, _INSIDE)
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
        self.tables[layout] = exchange.codecs.gradients.table_bytes(layout, device)
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
