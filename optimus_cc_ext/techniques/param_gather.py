"""The distributed optimizer's gather of the parameters, as differences in blocks of few bits.

Every replica holds all parameters W, in bf16 or fp16, and one of them, their owner, a master copy in fp32 of its shard:

    1. D = (the master copy, rounded) - W, of the own shard
    2. W stays as it was; D becomes a message              updating: matrices in few bits, vectors as they are
    3. the message goes to all                             start: all-gather
    4. W += what the message says, of every shard          finish

The owner takes what it sent like everybody else, so replicas stay equal to the bit. What a message leaves out is in the
next D, because that is taken from W as all have it: nothing accumulates beyond the master copy, and there is no state
to keep (weight differences: SDP4Bit, Jia et al. 2024, section 3.1).

No block crosses the end of a parameter or of a shard. A tied embedding has a bucket of its own on either stage, so its
copies are cut alike, and stay equal, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.block_reducer import BlockCodecs, ExchangePlan, Range
from optimus_cc_ext.techniques.collective import PendingCollective, start_all_gather
from optimus_cc_ext.techniques.factor_state import FactorStates
from optimus_cc_ext.techniques.technique import Technique

__all__ = ["Gather", "ParamGather", "Shards", "gather_plan"]


def gather_plan(
    numel: int, ranges: tuple[Sequence[Range], Sequence[Range]], dtype: torch.dtype, ranks: int, codec: Codec
) -> ExchangePlan:
    """Of a bucket of so many elements: its matrices are encoded, its vectors are not; one message for each shard."""
    return ExchangePlan(numel, *ranges, dtype, ranks, sharded=True, codecs=BlockCodecs(codec, codec))


class Shards:
    """One bucket's parameters, of which each replica owns a shard.

    Args:
        flat: the bucket, one dimension, as long as D equal shards.
        ranges: of its matrices, and of its vectors.
        scratch: memory for intermediate results, that all buckets on one stream can share.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        ranges: tuple[Sequence[Range], Sequence[Range]],
        *,
        group: dist.ProcessGroup,
        codec: Codec,
        gauge: Gauge,
        scratch: Scratch,
    ) -> None:
        self._group, self._codec, self._gauge, self._scratch = group, codec, gauge, scratch
        self.flat, self._rank, self.ranks = flat.detach(), group.rank(), group.size()
        plan = gather_plan(flat.numel(), ranges, flat.dtype, self.ranks, codec)
        self._shards = self.flat.view(self.ranks, -1)
        self._layouts = [plan.layout_of(d, d * self._shards.shape[1]) for d in range(self.ranks)]
        self._before = torch.empty_like(self._shards[self._rank])
        self._messages = torch.zeros(self.ranks, plan.message_bytes[0], dtype=torch.uint8, device=flat.device)
        self._gather: PendingCollective | None = None
        self.sent_bytes = plan.sent_bytes()
        self.nbytes = self._before.nbytes + self._messages.nbytes
        self.updated = False
        """Whether there is a message that nobody has sent yet."""

    def keep(self) -> None:
        """The own shard is about to be written."""
        self._before.copy_(self._shards[self._rank])

    def encode(self) -> None:
        """It has been: send the difference, and have it as all others still do."""
        own, layout, message = self._shards[self._rank], self._layouts[self._rank], self._messages[self._rank]
        with self._gauge.timed(own.device):
            difference = torch.sub(own, self._before, out=self._values())
            self._codec.encode(difference, layout, message)
            own.copy_(self._before)
        if self._gauge.on:
            self._codec.errors(difference, layout, message, self._gauge.note)
        self.updated = True

    def start(self) -> None:
        """Send it. All replicas call this alike."""
        self.updated = False
        own = self._messages[self._rank]
        self._gather = start_all_gather(self._messages.view(-1), own, self._group, "compressed parameter gather")

    def finish(self) -> None:
        """Wait for all messages, and take what they say."""
        assert self._gather is not None, "nothing was started"
        self._gather.wait()
        self._gather = None
        with self._gauge.timed(self._messages.device):
            for shard, layout, message in zip(self._shards, self._layouts, self._messages, strict=True):
                # What fills up a bucket is in no message, and stays as it is.
                difference = self._values().zero_()
                self._codec.decode(message, layout, difference)
                shard.add_(difference)

    def _values(self) -> torch.Tensor:
        return self._scratch.take("difference", tuple(self._before.shape), self._before.dtype, self._before.device)


class Gather:
    """The gather of a group of buckets: begun when it is made, finished by `wait`, which `finish_param_sync` calls."""

    @torch.no_grad()
    def __init__(self, buckets: Sequence[Shards]) -> None:
        self._buckets = buckets
        for shards in buckets:
            shards.start()

    @torch.no_grad()
    def wait(self) -> None:
        for shards in self._buckets:
            shards.finish()


class ParamGather(Technique):
    """All buckets of this rank.

    Args:
        codec: of the differences; None: Megatron gathers parameters as they are.
    """

    def __init__(self, codec: Codec | None) -> None:
        # The master copies remember what messages leave out: there is nothing to add to checkpoints.
        super().__init__("param_gather", on=False, states=FactorStates(1), gauge=Gauge())
        self.codec = codec
        self.dense_bytes = 0
        """What this rank sends of buckets whose parameters are gathered as they are."""

        self._scratch = Scratch()
        self._of: dict[int, Shards] = {}

    @property
    def buckets(self) -> list[Shards]:
        """In the order in which Megatron made them."""
        return list(self._of.values())

    @property
    def nbytes(self) -> int:
        """Memory that is kept for messages."""
        return sum(shards.nbytes for shards in self.buckets)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a gather of all parameters."""
        return self.dense_bytes + sum(shards.sent_bytes for shards in self.buckets)

    def add_bucket(
        self,
        bucket: object,
        flat: torch.Tensor,
        ranges: tuple[Sequence[Range], Sequence[Range]],
        *,
        group: dist.ProcessGroup,
    ) -> Shards:
        """Megatron made one more bucket on this rank; see `Shards`."""
        assert self.codec is not None, "parameters are gathered as they are"
        shards = Shards(flat, ranges, group=group, codec=self.codec, gauge=self.gauge, scratch=self._scratch)
        self._of[id(bucket)] = shards
        return shards

    @contextmanager
    @torch.no_grad()
    def updating(self, buckets: Sequence[object]) -> Iterator[None]:
        """What is called inside writes the own shards of these buckets."""
        written = [shards for bucket in buckets if (shards := self._of.get(id(bucket))) is not None]
        for shards in written:
            shards.keep()
        yield
        for shards in written:
            shards.encode()
