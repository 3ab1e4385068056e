"""Coded exchange over one flat tensor: a reduce-scatter and an all-gather of messages in few bits.

    reduce-scatter   encode a message for each shard; all-to-all; decode and add the messages of the own shard
    all-gather       encode the own shard; all-gather; decode every message, or add it to the tensor

A sum that every rank needs is a reduce-scatter followed by an all-gather, or between two stages one all-gather whose
messages are added up (`GatheredSum`). Gradient buckets, the parameter gather and the tied embedding use these. Without
a codec, native collectives do the same (`reducers.DenseReducer`, Megatron's own gather).

An `ExchangePlan` decides which rank adds up which part of a flat tensor, and computes the bytes. It knows shapes and
names of formats, so that the forecast and doctor can use it before there is a tensor:

    plan = ExchangePlan(numel=..., coded=matrices, dense=vectors, dtype=torch.float32, ranks=8, sharded=True,
                        formats=Formats("int4", "int8"))
    plan.sent_bytes(), plan.wire_bytes
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import BLOCK, SUM_FORMAT, block_format, format_named
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.metrics.traffic import exchanged_bytes, leaving_exchange, leaving_ring
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.collective import PendingCollective, start_all_gather, start_all_to_all
from optimus_cc_ext.techniques.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.techniques.ranges import Range, cut, dealt

__all__ = [
    "AllGather",
    "BlockCodecs",
    "ExchangePlan",
    "Formats",
    "GatheredSum",
    "Groups",
    "MessagePool",
    "ParameterRecord",
    "Range",
    "ReduceScatter",
    "message_bytes",
]


@dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """Facts about a parameter on which plans depend."""

    shape: tuple[int, ...]
    start: int
    """Offset of its gradient in the flat bucket."""

    tied: bool = False
    """True for a word embedding that another stage holds, too."""

    expert: bool = False

    router: bool = False
    """True for the weight of a router, which is small and decides which experts see a token."""

    embedding: bool = False
    """True for a word embedding or an output layer, whose gradient has one row per word, and a high rank."""

    norm_group: str = MAIN_NORM_GROUP

    @property
    def range(self) -> Range:
        """Range of its gradient in the flat bucket."""
        return self.start, math.prod(self.shape)

    @property
    def takes_blocks(self) -> bool:
        """True if the parameter's values can be encoded in blocks: a matrix, but not a router's."""
        return len(self.shape) >= 2 and not self.router

    @property
    def rows(self) -> int:
        """Rows of the parameter as a matrix; all dimensions but the first are columns."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])


class Formats(NamedTuple):
    """Names of the block formats of one exchange."""

    gradients: str
    """Format of the messages that each rank sends to the rank that adds them up."""

    sums: str
    """Format of the sums, which that rank sends to all ranks."""

    @classmethod
    def of(cls, chosen: str) -> "Formats | None":
        """Return the formats of a flag's value; None if it names no block format."""
        format = block_format(chosen)
        return None if format is None else cls(format, SUM_FORMAT)


class BlockCodecs(NamedTuple):
    """Codecs of an exchange; both are used on one stream."""

    gradients: Codec
    sums: Codec

    @classmethod
    def of(cls, chosen: str, make: Callable[[str], Codec]) -> "BlockCodecs | None":
        """Return codecs of the flag's value, each made by `make`; None if it names no block format."""
        format = block_format(chosen)
        return None if format is None else cls(make(format), make(SUM_FORMAT))

    @property
    def formats(self) -> Formats:
        """Names of the formats of both codecs."""
        return Formats(self.gradients.format.name, self.sums.format.name)


@dataclass(frozen=True)
class Groups:
    """The process groups whose ranks exchange messages, in one level or in two (module `two_levels`)."""

    whole: dist.ProcessGroup
    levels: Levels = ONE_LEVEL
    node: dist.ProcessGroup | None = None
    """The ranks of the group on this rank's node, or in its distributed-optimizer instance; None: one level."""

    rail: dist.ProcessGroup | None = None
    """The ranks of the group that have this rank's place in their nodes; None: one level."""

    beside: int = 1
    """Number of ranks of the group on this rank's node, with this rank; 1 if nodes are not known."""

    @property
    def place(self) -> int:
        """The place of this rank in its node, among the ranks of the group."""
        return self.whole.rank() % self.levels.members

    @property
    def owners(self) -> dist.ProcessGroup:
        """The ranks among which the distributed optimizer's shards are dealt: one instance of it, or all replicas."""
        return self.node if self.levels.instances and self.node is not None else self.whole

    def own_range(self, numel: int) -> Range:
        """Return the range of a flat bucket of `numel` elements that this rank's distributed optimizer reads."""
        length = numel // self.owners.size()
        return self.owners.rank() * length, length


class MessagePool:
    """Memory for the messages of this rank's exchanges."""

    def __init__(self) -> None:
        self.nbytes = 0

        self.shared_bytes = 0
        """Bytes that would be needed in addition if no exchanges of a bucket shared memory."""

        self._buckets: dict[int, _BucketMessages] = {}

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return `nbytes` bytes, flat uint8, zero, which belong to the caller."""
        self.nbytes += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def of_bucket(self, record: object) -> "_BucketMessages":
        """Return the pool of one bucket, whose callers all get the same memory.

        Gradients and parameters of a bucket are exchanged one after the other: its parameters have arrived before the
        forward pass reads them, and the sums of its gradients before the optimizer's step.

        Args:
            record: the record of the bucket, which outlives the pool.
        """
        return self._buckets.setdefault(id(record), _BucketMessages(self))


class _BucketMessages(MessagePool):
    """Memory for the messages of one bucket: as much as its largest exchange needs."""

    def __init__(self, pool: MessagePool) -> None:
        super().__init__()
        self._pool, self._memory = pool, torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return `nbytes` bytes, flat uint8, which all callers share. No message may be under way."""
        self._pool.shared_bytes += min(self.nbytes, nbytes)
        if not self.nbytes:
            self._memory = self._pool.take(nbytes, device)
        elif nbytes > self.nbytes:
            # The memory grows in place, so that tensors that were given out before keep it, with its content. The old
            # block returns to the current stream, while another one may still read or write it.
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._memory.untyped_storage().resize_(nbytes)
            self._memory.set_(self._memory.untyped_storage())
            self._memory[self.nbytes :].zero_()
            self._pool.nbytes += nbytes - self.nbytes
        self.nbytes = max(self.nbytes, nbytes)
        return self._memory[:nbytes]


def message_bytes(layout: BlockLayout, format: str, dtype: torch.dtype) -> int:
    """Return the bytes of each message of `layout`, of values of `dtype`, in the block format `format`."""
    return layout.sections(format_named(format).code_bytes, dtype.itemsize)[2]


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
        ranks: number of ranks in the group of the exchange.
        sharded: True if a rank needs only its own part of the sum.
        parts: number of parts into which the tensor is cut; None: one for each rank.
        owned: the parts that are exchanged, in the order of the group's ranks; None: all. With two levels a group of
            ranks on different nodes exchanges only the parts that these ranks own.
        like: a plan whose layout, with the tables of the kernels, this plan shares if it is the same layout.
    """

    numel: int
    coded: Sequence[Range]
    dense: Sequence[Range] = ()
    dtype: torch.dtype
    ranks: int
    sharded: bool
    formats: Formats
    parts: int | None = None
    owned: Sequence[int] | None = None
    like: "ExchangePlan | None" = None

    @cached_property
    def shards(self) -> tuple[list[list[Range]], list[list[Range]]]:
        """Encoded ranges that each rank adds up, and its dense ranges, by rank."""
        parts, owned = self.parts or self.ranks, self.owned or range(self.ranks)
        if self.sharded:
            size = self.numel // parts
            coded, dense = cut(self.coded, parts, size), cut(self.dense, parts, size)
        else:
            coded, dense = dealt(self.coded, parts, BLOCK), dealt(self.dense, parts, 1)
        return [coded[part] for part in owned], [dense[part] for part in owned]

    @cached_property
    def layout(self) -> BlockLayout:
        """Layout of one message per rank. It takes O(D + P) steps to make, for D ranks and P parameters."""
        if self.like is not None and self.like.shards == self.shards:
            return self.like.layout
        return BlockLayout(*self.shards)

    def layout_of(self, rank: int, start: int = 0) -> BlockLayout:
        """Make the layout of one rank's message, padded to the common message length; offsets are relative to
        `start`.
        """
        return self.layout.of_message(rank, start)

    @property
    def matrices(self) -> int:
        """Number of encoded ranges; if ranges are whole parameters, the number of encoded parameters."""
        return len(self.coded)

    @cached_property
    def message_bytes(self) -> tuple[int, int]:
        """Bytes of each message of gradients, and of each message of sums."""
        gradients, sums = (message_bytes(self.layout, format, self.dtype) for format in self.formats)
        return gradients, sums

    @property
    def wire_bytes(self) -> int:
        """Bytes of memory for messages: of gradients in both directions; messages of sums use the same memory later."""
        gradients, sums = self.message_bytes
        return self.ranks * max(2 * gradients, sums)

    @property
    def table_bytes(self) -> int:
        """Upper bound of the bytes of the kernels' tables on a GPU: 8 for a block or for 128 dense values.

        There is a table for all messages, and one for the message of a rank.
        """
        return 8 * (self.ranks + 1) * (self.layout.blocks + 2 * -(-self.layout.dense_numel // BLOCK))

    def sent_bytes(self, whole: bool = False) -> int:
        """Return the bytes that one rank sends; `whole`: each rank gets the whole sum, even if the plan is
        `sharded`.
        """
        gradients, sums = self.message_bytes
        return exchanged_bytes(gradients + (sums if whole or not self.sharded else 0), self.ranks)

    def leaving_bytes(self, beside: int, whole: bool = False) -> float:
        """Return the bytes of one rank that leave its node, which holds `beside` ranks; sums are sent round in a
        ring.
        """
        gradients, sums = self.message_bytes
        exchanged = leaving_exchange(gradients, self.ranks, beside)
        if self.sharded and not whole:
            return exchanged
        return exchanged + leaving_ring(exchanged_bytes(sums, self.ranks), self.ranks, beside)

    def gathered_bytes(self) -> int:
        """Return the bytes that one rank sends in an all-gather of messages in the format of gradients."""
        return exchanged_bytes(self.message_bytes[0], self.ranks)


class _Travelling:
    """Base class of exchanges that have at most one collective under way."""

    _pending: PendingCollective | None = None

    def wait(self) -> bool:
        """Wait for all messages; return False if none was started since the last wait."""
        if self._pending is None:
            return False
        self._pending.wait()
        self._pending = None
        return True


class ReduceScatter(_Travelling):
    """Sums of a flat tensor's parts: each rank adds up the parts that the other ranks sent it, in fp32 and in the order
    of the ranks, and adds this sum to its own part, which is never encoded.

    Args:
        buffers: (2, ranks, message bytes), uint8: outgoing and incoming messages.
        codec: encodes the messages.
        gauge: measures the compression error.
    """

    def __init__(
        self, plan: ExchangePlan, groups: Groups, codec: Codec, buffers: torch.Tensor, gauge: Gauge, purpose: str
    ) -> None:
        self._layout, self._group, self._codec, self._gauge = plan.layout, groups.whole, codec, gauge
        self._rank, self._purpose = groups.whole.rank(), purpose
        self._outgoing, self._incoming = buffers

    def start(self, flat: torch.Tensor) -> None:
        """Encode all parts of `flat` but the own one, and send each to the rank that adds it up."""
        with self._gauge.timed(flat.device):
            self._codec.encode(flat, self._layout, self._outgoing, skipped=self._rank)
        if self._gauge.on:
            self._codec.errors(flat, self._layout, self._outgoing, self._gauge.note, skipped=self._rank)
        if self._outgoing.numel():  # between nodes, all parts that ranks exchange can be empty
            self._pending = start_all_to_all(self._incoming, self._outgoing, self._group, self._purpose)

    def add_up(self, flat: torch.Tensor) -> None:
        """Add the parts that the other ranks sent to the own part of `flat`, which is exact."""
        self._incoming[self._rank].zero_()
        self._codec.decode_add(self._incoming, self._layout, self._rank, flat, onto=True)


class AllGather(_Travelling):
    """Gather of one message from each rank, all of one layout, to all ranks.

    Args:
        own: layout of this rank's message.
        messages: (ranks, message bytes), uint8.
    """

    def __init__(self, own: BlockLayout, groups: Groups, codec: Codec, messages: torch.Tensor, purpose: str) -> None:
        self._own, self._group, self.codec, self._purpose = own, groups.whole, codec, purpose
        self.messages, self._message = messages, messages[groups.whole.rank()]

    def encode(self, values: torch.Tensor) -> None:
        """Encode this rank's message from `values`, flat."""
        self.codec.encode(values, self._own, self._message)

    def note_errors(self, values: torch.Tensor, gauge: Gauge) -> None:
        """Measure the compression error of the message, encoded from `values`, if the gauge is on."""
        if gauge.on:
            self.codec.errors(values, self._own, self._message, gauge.note)

    def start(self) -> None:
        """Send the message to all ranks."""
        self._pending = start_all_gather(self.messages.view(-1), self._message, self._group, self._purpose)


class GatheredSum:
    """Sum of a flat tensor over few ranks: each sends all of it to all others, and adds up all messages, its own
    included.

    So all ranks have the same bits.

    Args:
        numel: elements of the tensor, which has `dtype` and is on `device`.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: Groups,
        codec: Codec,
        *,
        gauge: Gauge,
        pool: MessagePool,
        purpose: str,
    ) -> None:
        self._layout, self._gauge = BlockLayout.of_one(numel), gauge
        ranks, nbytes = groups.whole.size(), codec.message_bytes(self._layout, dtype)
        messages = pool.take(ranks * nbytes, device).view(ranks, nbytes)
        self._gather = AllGather(self._layout, groups, codec, messages, purpose)

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
