"""Messages in block formats of 8 or 4 bits: formats, codecs, buffers, and an all-gather of messages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.calls import PendingCollective, start_all_gather
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import SUM_FORMAT, block_format, format_named
from optimus_cc_ext.metrics.gauge import Gauge


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
        formats = Formats.of(chosen)
        return None if formats is None else cls(*map(make, formats))

    @property
    def formats(self) -> Formats:
        """Names of the formats of both codecs."""
        return Formats(self.gradients.format.name, self.sums.format.name)


class MessagePool:
    """Memory for the messages of this rank's exchanges."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._buckets: dict[int, _BucketMessages] = {}

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return `nbytes` bytes, flat uint8, zero, which belong to the caller."""
        self.nbytes += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def release(self) -> None:
        """Forget all memory: what is still exchanged keeps its own."""
        self._buckets.clear()
        self.nbytes = 0

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
        """Return a flat uint8 buffer of `nbytes` bytes, which all callers share: no message may be under way."""
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


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Device, codecs, gauge and memory, with which a plan and its groups become a reducer."""

    device: torch.device
    codecs: BlockCodecs | None = None
    """Codecs of the plan's formats; None: it has no blocks."""

    gauge: Gauge = field(default_factory=Gauge)
    """Measures the compression error of what is sent, and the seconds of encoding and decoding."""

    pool: MessagePool = field(default_factory=MessagePool)
    """Memory for messages."""


def message_bytes(layout: BlockLayout, format: str, dtype: torch.dtype) -> int:
    """Return the bytes of each message of `layout`, of values of `dtype`, in the block format `format`."""
    return layout.sections(format_named(format).code_bytes, dtype.itemsize)[2]


class AllGather:
    """Gather of one message from each rank, all of one layout, to all ranks.

    Args:
        own: layout of this rank's message.
        messages: (ranks, message bytes), uint8.
    """

    def __init__(
        self, own: BlockLayout, group: dist.ProcessGroup, codec: Codec, messages: torch.Tensor, purpose: str
    ) -> None:
        self._own, self._group, self.codec, self._purpose = own, group, codec, purpose
        self.messages, self._message = messages, messages[group.rank()]
        self._pending: PendingCollective | None = None

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

    def wait(self) -> bool:
        """Wait for all messages; return False if none was started since the last wait."""
        if self._pending is None:
            return False
        self._pending.wait()
        self._pending = None
        return True
