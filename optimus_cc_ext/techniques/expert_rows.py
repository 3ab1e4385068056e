"""Tokens on their way to the experts of other ranks and back, and their gradients, in blocks of few bits.

With a mixture of experts each rank has some experts of a layer. An all-to-all sends every token to the ranks of its
experts (dispatch), another one sends the results back (combine); the backward pass mirrors both. A token is a row of
values. It becomes a row of bytes, so that the numbers of rows that Megatron's dispatcher has computed remain valid, and
nothing else has to be sent:

    encode the rows -> all-to-all of rows of bytes -> decode the rows

All rows are encoded, also those that stay on their rank, so that results do not depend on the ranks' places. No state
is kept, and a recomputed forward pass gives the same bits: a message depends on the rows alone. Where a token leaves a
node once (`collectives/two_hops.py`), the sums that come back depend on which experts share a node.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.calls import connect
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Bytes
from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.collectives.two_hops import exchange
from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.metrics.traffic import Traffic
from optimus_cc_ext.techniques.crossing import levels_of_experts, stays_dense
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.schedule import Schedule
from optimus_cc_ext.techniques.technique import Technique

_MEASURED_ROWS = 128
"""Number of rows of an exchange whose errors are measured: an iteration has many exchanges, so that a few rows of each
show the error, and cost little next to coding.
"""


class ExpertRows(Technique):
    """Exchanges of rows in one direction, the forward or the backward pass: to the experts and back."""

    def __init__(self, config: OptimusConfig, traffic: TrafficClass, ring: Ring | None = None) -> None:
        super().__init__(config, traffic, ring)
        self._codec = self.new_codec()
        self._away: Sequence[bool] = ()
        """True for each rank of the group that is on another node than this rank; empty: nodes are not known."""

        self.hops: Groups | None = None
        """The groups by which tokens go once a node; None: they go direct."""

        self._width = 0
        self.expected = False
        """True if this rank has experts, to which other ranks send tokens."""

        self.seen = False
        """True if this rank has sent or received rows."""

    def place(self, grid: Grid, layout: Layout, groups: NewGroups) -> None:
        """Learn the nodes of the group's ranks; a preset leaves rows dense if all of them are on one node."""
        nodes = {place.rank: place.node.name for place in groups.places}
        ranks = [] if grid.expert_group is None else dist.get_process_group_ranks(grid.expert_group)
        self._away = [nodes[rank] != nodes[grid.place.rank] for rank in ranks]
        self._width = layout.row_width
        if stays_dense(self.config, self.traffic, groups.places, [ranks]):
            self._codec = None
        levels = levels_of_experts(self.config, groups.places, layout)
        if levels.two and grid.expert_group is not None:
            self.hops = groups.of_experts(grid.expert_group, levels)

    def preallocate(self, schedule: Schedule, like: torch.Tensor) -> None:
        """Let NCCL connect the groups before PyTorch holds nearly all memory."""
        for group in (self.hops.node, self.hops.rail) if self.hops is not None else ():
            if group is not None:
                connect(group, like.device, pairs=True)

    @property
    def tag(self) -> str:
        """The traffic's name in errors."""
        return self.traffic.tag

    def unseen(self, applied_steps: int) -> str | None:
        if not self.expected or self.seen or not self.config.is_on(self.traffic):
            return None
        return (
            "no token was exchanged among experts in the forward-backward passes that Optimus-CC sees, and the "
            "experts' formats compress tokens. Call megatron-core's schedule, or leave the formats out"
        )

    @property
    def codec(self) -> Codec | None:
        """Codec of the rows in this iteration; None: they are sent dense."""
        return None if self.dense else self._codec

    def codec_of(self, tensor: torch.Tensor) -> Codec | None:
        """Return the codec of the rows of `tensor`; None if it is sent dense, as probabilities are."""
        return self.codec if self.is_row(tensor) else None

    def is_row(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has tokens, not their probabilities."""
        return tensor.dim() == 2 and tensor.shape[1] == self._width

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the message of rows (n, width)."""
        if self.codec is None:
            return rows
        with self.gauge.timed(rows.device):
            message = self.codec.encode_rows(rows.contiguous())
        self._measure(self.codec, rows, message)
        return message

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of a message."""
        if self.codec is None:
            return message
        with self.gauge.timed(message.device):
            return self.codec.decode_rows(message, dtype)

    def _measure(self, codec: Codec, rows: torch.Tensor, message: torch.Tensor) -> None:
        if self.gauge.on and rows.numel():
            every = -(-rows.shape[0] // _MEASURED_ROWS)
            values = rows[::every].float()
            self.gauge.note(values, values - codec.decode_rows(message[::every].contiguous(), torch.float32))

    def count(
        self, traffic: Traffic, tensor: torch.Tensor, group: dist.ProcessGroup, sent: Sequence[int],
        hops: Callable[[int, int], Bytes] | None = None,
    ) -> None:  # fmt: skip
        """Count a transfer of `sent` rows of `tensor` to each rank of `group`; what stays on this rank is not sent.

        Args:
            hops: the bytes in two hops, by those of a row as it is sent and dense; None: rows go direct.
        """
        codec, dense = self.codec_of(tensor), tensor.shape[1:].numel() * tensor.itemsize
        row = dense if codec is None else codec.row_bytes(tensor.shape[1])
        others = sum(sent) - sent[group.rank()]
        away = sum(number for number, is_away in zip(sent, self._away, strict=False) if is_away)
        as_sent = Bytes(others * row, away * row) if hops is None else hops(row, dense)
        traffic.add(self.traffic, (others * dense, away * dense), as_sent)
        self.seen |= self.is_row(tensor)


class Direct:
    """Way of rows straight to each rank of `group` (`spread`), and back (`collect`).

    Args:
        received, sent: numbers of rows from and to each rank of the group; None: the same number for each.
    """

    def __init__(
        self, group: dist.ProcessGroup, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> None:  # fmt: skip
        self._group, self._received, self._sent = group, received, sent

    def spread(self, rows: torch.Tensor, coding: ExpertRows) -> torch.Tensor:
        return self._exchange(rows, coding, self._received, self._sent)

    def collect(self, rows: torch.Tensor, coding: ExpertRows) -> torch.Tensor:
        return self._exchange(rows, coding, self._sent, self._received)

    def _exchange(
        self, rows: torch.Tensor, coding: ExpertRows, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> torch.Tensor:
        arrived = exchange(coding.encode(rows), self._group, received, sent, f"the all-to-all of {coding.tag}")
        return coding.decode(arrived, rows.dtype)


Way = Callable[[torch.Tensor, ExpertRows], torch.Tensor]
"""Sends rows in the format of a direction, and returns those that arrive."""


class RowExchange(torch.autograd.Function):
    """Autograd function of one exchange of rows; a single node of the graph, because Megatron schedules its shared
    experts by the result's `grad_fn`.

    The directions are chosen in the forward pass, because the backward pass may run in another thread.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, forward: ExpertRows, backward: ExpertRows, there: Way, back: Way
    ) -> torch.Tensor:
        """Send rows there, in the format of the forward pass."""
        ctx.way_back = back, backward
        return there(rows, forward)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send the gradients of the rows that arrived back to the ranks that sent the rows."""
        back, backward = ctx.way_back
        return back(*gradients, backward), None, None, None, None
