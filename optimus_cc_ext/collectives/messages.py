"""Messages in block formats of 8 or 4 bits: formats, codecs, an all-gather of messages, and a sum by one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.calls import PendingCollective, start_all_gather
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.ring import Lane, Ring
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import SUM_FORMAT, block_format, format_named
from optimus_cc_ext.compressors.scratch import Scratch
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


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Device, codecs, gauge and memory, with which a plan and its groups become a reducer."""

    device: torch.device
    codecs: BlockCodecs | None = None
    """Codecs of the plan's formats; None: it has no blocks."""

    gauge: Gauge = field(default_factory=Gauge)
    """Measures the compression error of what is sent, and the seconds of encoding and decoding."""

    lane: Lane = field(default_factory=lambda: Ring().lane())
    """Way to the memory for messages."""

    scratch: Scratch = field(default_factory=Scratch)
    """Memory for intermediate results, which several reducers on one stream can share."""

    together: bool = False
    """True if several exchanges of the lane are under way at the same time."""


def message_bytes(layout: BlockLayout, format: str, dtype: torch.dtype) -> int:
    """Return the bytes of each message of `layout`, of values of `dtype`, in the block format `format`."""
    return layout.sections(format_named(format).code_bytes, dtype.itemsize)[2]


class AllGather:
    """Gather of one message from each rank, all of one layout, to all ranks.

    Args:
        own: layout of this rank's message.
    """

    def __init__(self, own: BlockLayout, group: dist.ProcessGroup, codec: Codec, purpose: str) -> None:
        self._own, self._group, self.codec, self._purpose = own, group, codec, purpose
        self._pending: PendingCollective | None = None

    def encode(self, values: torch.Tensor, message: torch.Tensor) -> None:
        """Encode this rank's message from `values`, flat."""
        self.codec.encode(values, self._own, message)

    def note_errors(self, values: torch.Tensor, message: torch.Tensor, gauge: Gauge) -> None:
        """Measure the compression error of the message, encoded from `values`, if the gauge is on."""
        if gauge.on:
            self.codec.errors(values, self._own, message, gauge.note)

    def start(self, messages: torch.Tensor, message: torch.Tensor) -> None:
        """Send the message to all ranks.

        Args:
            messages: (ranks, message bytes), uint8, for the messages of all ranks.
            message: this rank's message, which may be its row of `messages`.
        """
        self._pending = start_all_gather(messages.view(-1), message, self._group, self._purpose)

    def wait(self) -> bool:
        """Wait for all messages; return False if none was started since the last wait."""
        if self._pending is None:
            return False
        self._pending.wait()
        self._pending = None
        return True


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
        self._messages = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=tools.device)
        self._message = self._messages[groups.whole.rank()]
        self._gather = AllGather(self._layout, groups.whole, codec, purpose)
        self.nbytes = self._messages.nbytes + codec.table_bytes(self._layout, tools.device)

    @torch.no_grad()
    def reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor`, flat, in place; in fp32, in the order of the ranks."""
        gather = self._gather
        with self._gauge.timed(tensor.device):
            gather.encode(tensor, self._message)
        gather.note_errors(tensor, self._message, self._gauge)
        gather.start(self._messages, self._message)
        gather.wait()
        with self._gauge.timed(tensor.device):
            gather.codec.decode_add(self._messages, self._layout, 0, tensor)
