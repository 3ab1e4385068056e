"""Tokens on their way to the experts of other ranks and back, and their gradients, in blocks of few bits.

With a mixture of experts each rank has some experts of a layer. An all-to-all sends every token to the ranks of its
experts (dispatch), another one sends the results back (combine); the backward pass mirrors both. A token is a row of
values. It becomes a row of bytes, so that the numbers of rows that Megatron's dispatcher has computed remain valid, and
nothing else has to be sent:

    encode the rows -> all-to-all of rows of bytes -> decode the rows

All rows are encoded, also those that stay on their rank, so that results do not depend on the ranks' places. No state
is kept, and a recomputed forward pass gives the same bits: a message depends on the rows alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.calls import start_all_to_all
from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.metrics.traffic import Traffic
from optimus_cc_ext.techniques.crossing import stays_dense
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import NewGroups
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
        return self.codec if self._is_row(tensor) else None

    def _is_row(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() == 2 and tensor.shape[1] == self._width

    def exchange(
        self, rows: torch.Tensor, group: dist.ProcessGroup, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> torch.Tensor:
        """Send the rows (n, width) to the ranks of `group`; return the rows that have arrived from them, (m, width).

        Args:
            received, sent: numbers of rows from and to each rank of the group; None: the same number for each.

        Raises:
            OptimusError: the all-to-all failed.
        """
        message = rows = rows.contiguous()
        if self.codec is not None:
            with self.gauge.timed(rows.device):
                message = self.codec.encode_rows(rows)
            self._measure(self.codec, rows, message)
        arrived = message.new_empty(message.shape[0] if received is None else sum(received), message.shape[1])
        start_all_to_all(arrived, message, group, f"the all-to-all of {self.traffic.tag}", received, sent).wait()
        if self.codec is None:
            return arrived
        with self.gauge.timed(rows.device):
            return self.codec.decode_rows(arrived, rows.dtype)

    def _measure(self, codec: Codec, rows: torch.Tensor, message: torch.Tensor) -> None:
        if self.gauge.on and rows.numel():
            every = -(-rows.shape[0] // _MEASURED_ROWS)
            values = rows[::every].float()
            self.gauge.note(values, values - codec.decode_rows(message[::every].contiguous(), torch.float32))

    def count(self, traffic: Traffic, tensor: torch.Tensor, group: dist.ProcessGroup, sent: Sequence[int]) -> None:
        """Count a transfer of `sent` rows of `tensor` to each rank of `group`; what stays on this rank is not sent."""
        codec, dense = self.codec_of(tensor), tensor.shape[1:].numel() * tensor.itemsize
        row = dense if codec is None else codec.row_bytes(tensor.shape[1])
        others = sum(sent) - sent[group.rank()]
        away = sum(number for number, is_away in zip(sent, self._away, strict=False) if is_away)
        traffic.add(self.traffic, (others * dense, away * dense), (others * row, away * row))
        self.seen |= self._is_row(tensor)


class RowExchange(torch.autograd.Function):
    """Autograd function of one exchange of rows; a single node of the graph, because Megatron schedules its shared
    experts by the result's `grad_fn`.

    The directions are chosen in the forward pass, because the backward pass may run in another thread.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, forward: ExpertRows, backward: ExpertRows, group: dist.ProcessGroup,
        received: Sequence[int] | None, sent: Sequence[int] | None,
    ) -> torch.Tensor:  # fmt: skip
        """Send rows in the format of the forward pass."""
        ctx.way_back = backward, group, sent, received
        return forward.exchange(rows, group, received, sent)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send the gradients of the rows that arrived back to the ranks that sent the rows."""
        technique, group, received, sent = ctx.way_back
        return technique.exchange(*gradients, group, received, sent), None, None, None, None, None
