"""The distributed optimizer's gather of the parameters, as differences in blocks of few bits.

Every replica holds all parameters W, in bf16 or fp16; one replica, the owner of a shard, holds its master copy in fp32:

    1. D = (the master copy, rounded) - W, of a slice of the own shard
    2. W keeps its old value; D becomes a message          update: matrices in few bits, vectors dense
    3. the message goes to all replicas                    start: all-gather
    4. W += decoded D, of every shard                      finish

The owner adds its own decoded message like every other replica, so replicas stay equal to the bit. The compression
error of a message is part of the next D, because D is taken from the W that all replicas have. So no error accumulates
beyond the master copy, and there is no state to keep (SDP4Bit, Jia et al. 2024, section 3.1, "weight differences").
Old values are kept of one slice at a time.

No block crosses the end of a parameter or of a shard. A tied embedding has a bucket of its own on both stages, so its
copies are cut alike, and stay equal, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimus_cc_ext.collectives.calls import connect
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.messages import AllGather
from optimus_cc_ext.collectives.ranges import views
from optimus_cc_ext.collectives.ring import Lane, Ring, Slice
from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.bucket import Bucket
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.technique import Iteration, Technique

Write = Callable[[Any, int, int], None]
"""Writes the new values of a range of one of Megatron's buckets, from an offset to another."""


class Shards:
    """Parameters of one bucket, of which each replica owns a shard.

    Args:
        bucket: the bucket, whose parameters are as long as D equal shards; each use reads them anew.
        plan: the plan of the gather, made by `bucket_plan.gather_plan`.
        scratch: memory for intermediate results, which all buckets on one stream can share.
        lane: way to the memory for the messages of all ranks.
        together: True if other buckets are gathered meanwhile.
    """

    def __init__(
        self,
        bucket: Bucket,
        plan: Any,
        groups: Groups,
        codec: Any,
        *,
        gauge: Gauge,
        scratch: Scratch,
        lane: Lane,
        together: bool,
    ) -> None:
        self.bucket, self.plan, self.groups = bucket, plan, groups
        self.codec, self.gauge, self.scratch, self._lane = codec, gauge, scratch, lane
        self.slices = self._cut()
        lane.reserve(self.slices, together=together)
        self.updated = False
        """True if there is an encoded message that has not been sent."""

        self.gathered = False
        """True if all replicas have received the parameters of this rank's shard since the last pass began."""

    def _cut(self) -> list[Any]:
        """Make the slices, each with the bytes of its change, `change_bytes`, and its own `message`."""
        plan, own = self.plan, self.plan.own_layouts(self.groups.whole.rank())
        return [_GatherSlice(self, *each) for each in zip(plan.layouts, own, plan.gather_bytes, strict=True)]

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's messages of one gather."""
        return self.plan.message_bytes[0]

    @property
    def nbytes(self) -> int:
        """Bytes of memory for the own messages until they are sent."""
        return sum(each.message.nbytes for each in self.slices)

    @property
    def change_bytes(self) -> int:
        """Bytes of the most values that are encoded at once, in memory that all buckets share."""
        return max((each.change_bytes for each in self.slices), default=0)

    def release(self) -> None:
        """Drop the memory: the parameters are gathered dense from now on."""
        self.slices.clear()
        del self.scratch, self.codec

    def encode(self, write: Write) -> None:
        """Let `write` update this rank's shard, encode the change, and restore the values that all replicas have."""
        self.gathered = False
        for each in self.slices:
            each.encode(write)
        self.updated = True

    def start(self) -> None:
        """Send the message. All replicas call this for the same buckets, in the same order."""
        self.updated = False
        self._lane.submit(self.slices)

    def finish(self) -> None:
        """Wait for all messages, and add their differences to the parameters of all shards."""
        self._lane.end(self.slices)
        self.gathered = True


class _GatherSlice(Slice):
    """Slice of a gather: a portion of every shard.

    Args:
        layout: layout of the messages of all ranks; `own` is that of this rank's message.
    """

    def __init__(self, shards: Shards, layout: BlockLayout, own: BlockLayout, nbytes: int) -> None:
        super().__init__(nbytes, shards.bucket.device)
        self._shards, self._layout, self._spans = shards, layout, own.spans(0)
        self.tables[layout] = shards.codec.table_bytes(layout, self.device)
        self._lengths = [length for _, length in self._spans]
        self.change_bytes = sum(self._lengths) * shards.plan.dtype.itemsize
        self.message = torch.zeros(nbytes // shards.plan.ranks, dtype=torch.uint8, device=self.device)
        """This rank's message, from the optimizer's step until it is sent."""

        self._gather = AllGather(own, shards.groups.whole, shards.codec, "compressed parameter gather")
        self._messages = self.message.new_empty(0)

    def encode(self, write: Write) -> None:
        """Encode the change that `write` makes to the slice's values of the own shard, and restore their old values."""
        shards, flat = self._shards, self._shards.bucket.parameters
        own = views(flat, self._spans)
        before = shards.scratch.take("before", (sum(self._lengths),), flat.dtype, self.device).split(self._lengths)
        torch._foreach_copy_(before, own)
        try:
            for start, length in self._spans:
                write(shards.bucket.of_megatron, start, start + length)
            with shards.gauge.timed(self.device):
                torch._foreach_sub_(own, before)
                self._gather.encode(flat, self.message)
            self._gather.note_errors(flat, self.message, shards.gauge)
        finally:
            with shards.gauge.timed(self.device):
                torch._foreach_copy_(own, before)

    def cut(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the messages of all ranks."""
        return (memory[: self.nbytes].view(self._shards.plan.ranks, -1),)

    @torch.no_grad()
    def begin(self, *views: torch.Tensor) -> None:
        """Send the message to all ranks."""
        (self._messages,) = views
        self._gather.start(self._messages, self.message)

    @torch.no_grad()
    def end(self) -> None:
        """Wait for all messages, and add their differences to the parameters."""
        self._gather.wait()
        shards = self._shards
        # The padding of a bucket is in no message, and keeps its values.
        with shards.gauge.timed(self.device):
            shards.codec.decode_onto(self._messages, self._layout, shards.bucket.parameters)


class Gather:
    """Gather of a group of buckets: it begins when it is made, and ends in `wait`, which `finish_param_sync` calls.

    Messages are decoded in `wait`, on the current stream. A GPU with one queue of work for all streams
    (CUDA_DEVICE_MAX_CONNECTIONS=1) starts kernels in the order in which the host launches them: a kernel that waits for
    this gather must not be launched before the forward pass of the bucket before, or that pass waits, too.
    """

    @torch.no_grad()
    def __init__(self, buckets: Sequence[Shards]) -> None:
        self._buckets = buckets
        for shards in buckets:
            shards.start()

    @torch.no_grad()
    def wait(self) -> None:
        """Let later work on the current stream read the updated parameters."""
        for shards in self._buckets:
            shards.finish()


class ParamGather(Technique):
    """Gathers of all buckets of this rank. Checkpoints need nothing: master copies contain the compression error."""

    kind: type[Shards] = Shards

    def __init__(self, config: OptimusConfig, traffic: TrafficClass, ring: Ring | None = None) -> None:
        super().__init__(config, traffic, ring)
        self.codec = self.new_codec()
        self.seen = False
        """True once a step's changes were gathered."""

        self.buckets: list[Shards] = []
        """Buckets that we gather, in the order in which Megatron made them."""

    def gather(self, buckets: Sequence[Shards]) -> Gather:
        """Begin the gather of these buckets. All replicas call this in the same order."""
        self.seen = True
        return Gather(buckets)

    def begin(self, this: Iteration) -> None:
        """Begin a pass. Any code may have changed parameters before it, so no shard counts as gathered."""
        super().begin(this)
        for shards in self.buckets:
            shards.gathered = False

    def unseen(self, applied_steps: int) -> str | None:
        if not applied_steps or not self.buckets or self.seen:
            return None
        return (
            "no parameters were gathered after a step of Megatron's distributed optimizer, which param_gather_format "
            "compresses. Leave it out with another optimizer"
        )

    def place(self, grid: Grid, layout: Layout, groups: NewGroups) -> None:
        """Get the single-rank group, if the gather is compressed."""
        if self.config.is_on(self.traffic):
            self.alone = groups.alone()

    def release(self) -> None:
        """Drop messages and intermediate results."""
        self.codec = None
        self.scratch.clear()
        self.lane.keep([])
        for shards in self.buckets:
            shards.release()

    @property
    def message_bytes(self) -> int:
        """Bytes of memory for messages that have not been sent, and for the old values of one slice."""
        change = max((shards.change_bytes for shards in self.buckets), default=0)
        return change + sum(shards.nbytes for shards in self.buckets)

    def add_bucket(self, bucket: Bucket, plan: Any, groups: Groups, *, together: bool = False) -> Shards:
        """Add a bucket whose parameters are gathered in few bits; the arguments are those of `Shards`."""
        if self.alone is not None and not self.buckets:
            connect(self.alone, bucket.device, pairs=False)
        shards = self.kind(
            bucket, plan, groups, self.codec,
            gauge=self.gauge, scratch=self.scratch, lane=self.lane, together=together,
        )  # fmt: skip
        self.buckets.append(shards)
        return shards

    def of(self, buckets: Sequence[object]) -> list[Shards]:
        """Return those of these buckets of Megatron's that we gather."""
        asked = set(map(id, buckets))
        return [shards for shards in self.buckets if id(shards.bucket.of_megatron) in asked]

    @torch.no_grad()
    def update(self, buckets: Sequence[object], write: Write) -> list[object]:
        """Encode the changes that `write` makes to the own shards of these buckets of Megatron's; return the buckets
        that are written so.
        """
        # Sent dense, the master copies arrive whole, and no difference is left over for a later message.
        written = [] if self.dense else self.of(buckets)
        self.seen |= self.dense
        for shards in written:
            shards.encode(write)
        return [shards.bucket.of_megatron for shards in written]
