"""Reduces one gradient bucket over its replicas in blocks of few bits: each of them adds up one shard.

    1. of each shard one message, matrices in few bits and vectors as they are;
       message d goes to replica d                                              start: all-to-all
    2. own shard = sum of what came, in fp32, in the order of the replicas
    3. that sum, matrices in 8 bits, goes to all                                second_phase: all-gather
    4. every shard, the own one too, = what its message says                    finish

With the distributed optimizer 2 is the end: its shards are those that are added up. Unless whole gradients are wanted.
Nothing is requantised to fewer than 8 bits, and nothing at all per hop: of N replicas the errors average out in 2.

No block crosses the end of a parameter. Parameters that tensor-parallel ranks replicate lie between others that they do
not: a block of both would have another scale on each rank, and the replicas of the one would drift apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import BLOCK, SUM_FORMAT, block_format
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.metrics.traffic import exchanged_bytes
from optimus_cc_ext.techniques.collective import PendingCollective, start_all_gather, start_all_to_all

__all__ = ["BlockCodecs", "BlockReducer", "ExchangePlan", "GatheredSum", "Range", "range_in", "sent_alone"]

Range = tuple[int, int]
"""(start, length) in elements of a flat tensor."""


class BlockCodecs(NamedTuple):
    """What a reduction encodes with; both on one stream."""

    gradients: Codec
    sums: Codec
    """The codec of sums on their way back, of `formats.SUM_FORMAT`."""

    @classmethod
    def of(cls, chosen: str, make: Callable[[str], Codec]) -> "BlockCodecs | None":
        """Those of the format that is named so, each made by `make`; None where it is not one of blocks."""
        format = block_format(chosen)
        return None if format is None else cls(make(format), make(SUM_FORMAT))


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Who adds up which part of a bucket, and the bytes of it: known before there is a reducer.

    Without the distributed optimizer's shards, what there is is dealt out evenly: blocks, and what is not encoded.

    Args:
        numel: elements of the bucket.
        coded, dense: parameters in it, encoded or not.
        dtype: of the bucket.
        sharded: whether its D equal parts are what the distributed optimizer reads.
    """

    numel: int
    coded: Sequence[Range]
    dense: Sequence[Range]
    dtype: torch.dtype
    ranks: int
    sharded: bool
    codecs: BlockCodecs

    @cached_property
    def shards(self) -> tuple[list[list[Range]], list[list[Range]]]:
        """By replica: the encoded ranges that it adds up, and the others."""
        if not self.sharded:
            return _dealt(self.coded, self.ranks, BLOCK), _dealt(self.dense, self.ranks, 1)
        size = self.numel // self.ranks
        return _cut(self.coded, self.ranks, size), _cut(self.dense, self.ranks, size)

    @cached_property
    def layout(self) -> BlockLayout:
        """A message per shard. Layouts take O(D + P) steps to make, for D replicas and P parameters."""
        return BlockLayout(*self.shards)

    def layout_of(self, shard: int, start: int = 0) -> BlockLayout:
        """Make the layout of one shard's message, as long as all others are; offsets are relative to `start`."""
        return self.layout.of_message(shard, start)

    @property
    def message_bytes(self) -> tuple[int, int]:
        """Of each message of gradients, and of each message of sums."""
        layout = self.layout
        gradients, sums = (codec.message_bytes(layout, self.dtype) for codec in self.codecs)
        return gradients, sums

    @property
    def wire_bytes(self) -> int:
        """Memory for messages: of gradients for both ways; then those of sums lie there."""
        gradients, sums = self.message_bytes
        return self.ranks * max(2 * gradients, sums)

    def sent_bytes(self, whole: bool = False) -> int:
        """Bytes that a replica sends."""
        gradients, sums = self.message_bytes
        return exchanged_bytes(gradients + (sums if whole or not self.sharded else 0), self.ranks)


@lru_cache
def sent_alone(
    numel: int, dtype: torch.dtype, ranks: int, sharded: bool, codecs: BlockCodecs, whole: bool = False
) -> int:
    """Bytes that a replica sends of one encoded parameter, in an exchange of its own; asked every iteration."""
    bucket = -(-numel // ranks) * ranks
    return ExchangePlan(bucket, [(0, numel)], [], dtype, ranks, sharded, codecs).sent_bytes(whole)


class BlockReducer:
    """See above, and `Reducer`.

    Args:
        flat: the bucket, one dimension, fp32 or bf16.
        matrices: views into it, of any shape; they are encoded.
        dense: views into it; they are summed as they are, in fp32.
        sharded: whether a replica reads its part of the bucket only.
        group: the bucket's data-parallel group.
        gauge: measures what encoding the gradients loses, and what it costs.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        matrices: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        *,
        sharded: bool,
        group: dist.ProcessGroup,
        codecs: BlockCodecs,
        gauge: Gauge | None = None,
    ) -> None:
        self._flat, self._group, self._codecs, self._gauge = flat, group, codecs, gauge or Gauge()
        coded, plain = ([range_in(flat, view) for view in views] for views in (matrices, dense))
        self._sharded, self.matrices, self.encoded = sharded, len(matrices), 0
        self._rank, ranks = group.rank(), group.size()
        plan = ExchangePlan(flat.numel(), coded, plain, flat.dtype, ranks, sharded, codecs)
        self._layout, self._own = plan.layout, plan.layout_of(self._rank)
        self._plan_bytes = {whole: plan.sent_bytes(whole) for whole in (False, True)}
        gradients, sums = plan.message_bytes
        wire = torch.zeros(plan.wire_bytes, dtype=torch.uint8, device=flat.device)
        self.nbytes = wire.nbytes
        self._outgoing, self._incoming = wire[: 2 * ranks * gradients].view(2, ranks, gradients)
        self._sums = wire[: ranks * sums].view(ranks, sums)  # begun when the exchange has ended
        self._whole = False
        self._exchange: PendingCollective | None = None
        self._gather: PendingCollective | None = None

    def sent_bytes(self, whole: bool = False) -> int:
        """See `Reducer`."""
        return self._plan_bytes[whole]

    def reduce(self, whole: bool = False) -> None:
        """All three phases; nothing is left outstanding."""
        self.start(whole)
        self.finish()

    @torch.no_grad()
    def start(self, whole: bool = False) -> None:
        """See `Reducer`."""
        self._whole = whole or not self._sharded
        self.encoded += self.matrices
        with self._gauge.timed(self._flat.device):
            self._codecs.gradients.encode(self._flat, self._layout, self._outgoing)
        if self._gauge.on:
            self._codecs.gradients.errors(self._flat, self._layout, self._outgoing, self._gauge.note)
        self._exchange = start_all_to_all(
            self._incoming, self._outgoing, self._group, "compressed gradient reduction (exchange)"
        )

    @torch.no_grad()
    def second_phase(self) -> None:
        """See `Reducer`."""
        if self._exchange is None:
            return
        self._exchange.wait()
        self._exchange = None
        with self._gauge.timed(self._flat.device):
            self._codecs.gradients.decode_add(self._incoming, self._layout, self._rank, self._flat)
            if self._whole:
                self._codecs.sums.encode(self._flat, self._own, self._sums[self._rank])
        if self._whole:
            self._gather = start_all_gather(
                self._sums.view(-1), self._sums[self._rank], self._group, "compressed gradient reduction (sums)"
            )

    @torch.no_grad()
    def finish(self) -> None:
        """See `Reducer`."""
        self.second_phase()
        if self._gather is None:
            return
        self._gather.wait()
        self._gather = None
        with self._gauge.timed(self._flat.device):
            self._codecs.sums.decode(self._sums, self._layout, self._flat)


class GatheredSum:
    """Sums a flat tensor over few ranks: each sends all of it to all, and adds what all messages say, its own too.

    So all have the same bits.

    Args:
        numel: of what is summed; it has `dtype`, and lies on `device`.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, codec: Codec, gauge: Gauge
    ) -> None:
        self._layout, self._group, self._codec, self._gauge = BlockLayout.of_one(numel), group, codec, gauge
        message = codec.message_bytes(self._layout, dtype)
        self._messages = torch.zeros(group.size(), message, dtype=torch.uint8, device=device)
        self.nbytes = self._messages.nbytes

    @torch.no_grad()
    def reduce(self, tensor: torch.Tensor, purpose: str) -> None:
        """Sum `tensor`, flat, in place; in fp32, in the order of the ranks."""
        own = self._messages[self._group.rank()]
        with self._gauge.timed(tensor.device):
            self._codec.encode(tensor, self._layout, own)
        if self._gauge.on:
            self._codec.errors(tensor, self._layout, own, self._gauge.note)
        start_all_gather(self._messages.view(-1), own, self._group, purpose).wait()
        with self._gauge.timed(tensor.device):
            self._codec.decode_add(self._messages, self._layout, 0, tensor)


def range_in(flat: torch.Tensor, view: torch.Tensor) -> Range:
    """Where a contiguous view into `flat` lies."""
    return int(view.storage_offset() - flat.storage_offset()), view.numel()


def _cut(ranges: Sequence[Range], parts: int, size: int) -> list[list[Range]]:
    """Cut ranges at every multiple of `size`; what lies between two multiples makes up a part."""
    cut: list[list[Range]] = [[] for _ in range(parts)]
    for start, length in ranges:
        end = start + length
        while start < end:
            part = start // size
            stop = min(end, (part + 1) * size)
            cut[part].append((start, stop - start))
            start = stop
    return cut


def _dealt(ranges: Sequence[Range], parts: int, unit: int) -> list[list[Range]]:
    """Ranges cut after whole units, counted from where each begins, so that all parts but the last get as many."""
    share = -(-sum(-(-length // unit) for _, length in ranges) // parts)
    dealt: list[list[Range]] = [[] for _ in range(parts)]
    units = 0
    for start, length in sorted(ranges):
        done = 0
        while done < length:
            part, used = divmod(units, share)
            taken = min(length - done, (share - used) * unit)
            dealt[part].append((start + done, taken))
            done += taken
            units += -(-taken // unit)
    return dealt
