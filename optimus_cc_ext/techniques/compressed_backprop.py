"""Compressed backpropagation with lazy error propagation (paper sections 5.1 and 5.2), and compressed activations.

A pipeline stage sends the gradient of its input to the stage before it. The message is low-rank factors or blocks in
few bits (`messages`), and its residual is added to the link's next compressed message.

A link is one directed pair of stages. Its messages are numbered 0, 1, ... within an iteration, on both ends, by the
order in which they are sent and received. Both ends decide from the same schedule, and in a warm-up from the same
iteration number, which messages are compressed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.compressors.fast import fast_compressor
from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.metrics.error_statistics import ErrorStatistics
from optimus_cc_ext.techniques.crossing import hops_between, stays_dense
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.messages import BlockMessages, DenseMessages, LinkPlan, LowRankMessages
from optimus_cc_ext.techniques.schedule import Message, Schedule
from optimus_cc_ext.techniques.technique import Iteration, Technique
from optimus_cc_ext.techniques.transfer import Transfer


class CompressedBackprop(Technique):
    """Compressed activation gradients of this rank: the link to the stage before it, and the link from the stage after
    it.
    """

    states_on_demand = True

    def __init__(self, config: OptimusConfig, traffic: TrafficClass, ring: Ring | None = None) -> None:
        super().__init__(config, traffic, ring)
        self.compressor: LowRank = fast_compressor()
        self._codec = self.new_codec()
        self.statistics = ErrorStatistics()
        self.sending: PipelineLink | None = None
        self.receiving: PipelineLink | None = None

    def place(self, grid: Grid, layout: Layout, groups: NewGroups) -> None:
        """Make the links that a rank at this place has."""
        if not self.config.is_on(self.traffic):
            return
        assert grid.pipeline_group is not None, "the model has no pipeline"
        ranks, stage = dist.get_process_group_ranks(grid.pipeline_group), grid.place.stage
        before, after = (stage - 1) % grid.stages, (stage + 1) % grid.stages
        crosses = partial(_crosses, self.config, self.traffic, grid, groups.places)
        # With interleaving the first stage, too, sends activation gradients: to an earlier chunk, on the last stage.
        if (stage > 0 or grid.chunks > 1) and crosses(before):
            self.connect_to(before, stage, grid.place.rank, ranks[before])
        if (stage < grid.stages - 1 or grid.chunks > 1) and crosses(after):
            self.receiving = self._link(LinkPlan(self.config, after, stage), grid.place.rank, ranks[after], "next")

    def connect_to(self, receiving_stage: int, sending_stage: int, rank: int, peer_rank: int) -> None:
        """Make the link on which this rank sends."""
        self.sending = self._link(LinkPlan(self.config, sending_stage, receiving_stage), rank, peer_rank, "previous")

    def _link(self, plan: LinkPlan, rank: int, peer_rank: int, peer: str) -> "PipelineLink":
        dense, compressed = DenseMessages(self.statistics), self.messages(plan)
        return PipelineLink(plan, dense, compressed, rank, peer_rank, f"the {peer} stage")

    def messages(self, plan: LinkPlan) -> DenseMessages:
        """Make the object for compressed messages of one end of a link."""
        if self._codec is not None:
            return BlockMessages(self._codec, self.gauge, residual=bool(plan.config.lazy_error_propagation))
        return LowRankMessages(
            plan, self.compressor,
            states=self.states, scratch=self.scratch, gauge=self.gauge, statistics=self.statistics,
        )  # fmt: skip

    def preallocate(self, schedule: Schedule, like: torch.Tensor) -> None:
        """Make the state for an iteration whose activation gradients have the shape, dtype and device of `like`."""
        if self.sending is not None:
            self.sending.preallocate(schedule, like)

    def shrinks(self, like: torch.Tensor | None) -> bool | None:
        """Return whether a low-rank or block message is smaller than a gradient like `like`; None without links or
        `like`.
        """
        ends = self.sending or self.receiving
        return None if ends is None or like is None else ends.plan.compresses(Message(0, epilogue=True), like.shape)

    def begin(self, this: Iteration) -> None:
        """Begin a pass: reset the statistics, zero residuals that last for one iteration, number messages from 0."""
        super().begin(this)
        self.statistics.begin(this.measured and self.config.compression_error_statistics)
        compressing = not (self.dense or this.is_among_the_first(self.config.compressed_backprop_warmup))
        # Residuals from before a warm-up, which a run with a shorter one has left, would be out of date at its end.
        if not compressing or self.config.residual_across_iterations == "drop":
            self.states.zero_residuals()
        for link in self._links():
            link.begin(this.schedule, compressing=compressing)

    def end(self) -> None:
        """End the pass on both links: check the number of messages, and wait for those that are being sent."""
        for link in self._links():
            link.end()

    def transfers(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Transfer]:
        """Make the transfers that replace tensors of one of Megatron's point-to-point calls, by role.

        Args:
            tensors: by role: `send_prev`, `recv_prev`, `send_next`, `recv_next`; (sequence, micro-batch, hidden) each.
        """
        send_prev, recv_next, recv_prev = tensors["send_prev"], tensors["recv_next"], tensors["recv_prev"]
        transfers = {}
        if send_prev is not None and self.sending is not None:
            transfers["send_prev"] = self.sending.send(send_prev)
        if recv_next is not None and self.receiving is not None:
            transfers["recv_next"] = self.receiving.receive(recv_next)
        if recv_prev is not None and self.statistics.on:
            transfers["recv_prev"] = Transfer(recv_prev, after_wait=partial(self.statistics.activation, recv_prev))
        return transfers

    def release(self) -> None:
        """Drop both links, and so their messages."""
        self.sending = self.receiving = None

    @property
    def compresses(self) -> bool:
        """True if this rank sends or receives compressed activation gradients in this iteration."""
        return not self.dense and any(self._links())

    def mismatch(self, state_dict: Mapping[str, Any]) -> str | None:
        """Return why the state does not fit: this rank sends nothing, or shapes differ; None if it fits."""
        if state_dict.get("states") and self.sending is None:
            return "this rank sends no compressed messages"
        return super().mismatch(state_dict)

    def _links(self) -> list["PipelineLink"]:
        return [link for link in (self.sending, self.receiving) if link is not None]


class PipelineLink:
    """One end of a link: numbers the messages of an iteration, and decides which of them are compressed.

    Args:
        dense, messages: the objects for uncompressed and for compressed messages.
        peer: description of the other end for errors.
    """

    def __init__(
        self, plan: LinkPlan, dense: DenseMessages, messages: DenseMessages, rank: int, peer_rank: int, peer: str
    ) -> None:
        self.plan, self._dense, self.messages = plan, dense, messages
        self._rank, self._peer_rank, self._peer = rank, peer_rank, peer
        self._expected: Sequence[Message] = ()
        self._compressing = True
        self.compressed: list[bool] = []
        """Decision for each message of this iteration so far: True if it was compressed."""

    def begin(self, schedule: Schedule, *, compressing: bool = True) -> None:
        """Number the messages from 0 again. Without `compressing`, during the warm-up, all of them are dense."""
        self._expected = schedule.messages(self.plan.receiving_stage)
        self._compressing = compressing
        self.compressed = []
        self.messages.begin()

    def end(self) -> None:
        """Check that every message of the iteration has passed, and wait for those that are still being sent.

        Raises:
            RanksDisagree: more or fewer messages passed than the schedule has.
            OptimusError: a message could not be sent.
        """
        if len(self.compressed) != len(self._expected):
            raise self._disagreement(len(self.compressed))
        self.messages.end()

    def send(self, gradient: torch.Tensor) -> Transfer:
        """Make the transfer that sends `gradient` (sequence, micro-batch, hidden), dense or compressed."""
        message, messages = self._next(gradient.shape)
        return messages.send(gradient, message.chunk, len(self.compressed) - 1)

    def receive(self, gradient: torch.Tensor) -> Transfer:
        """Make the transfer that receives `gradient`, dense or compressed."""
        _, messages = self._next(gradient.shape)
        return messages.receive(gradient)

    def preallocate(self, schedule: Schedule, like: torch.Tensor) -> None:
        """Make the state for each message of the schedule that will be compressed."""
        for message in schedule.messages(self.plan.receiving_stage):
            if self.plan.compresses(message, like.shape):
                self.messages.preallocate(like, message.chunk)

    def _next(self, shape: torch.Size) -> tuple[Message, DenseMessages]:
        """Return the message that passes now, and the object for its kind."""
        if len(self.compressed) == len(self._expected):
            raise self._disagreement(len(self.compressed) + 1)
        message = self._expected[len(self.compressed)]
        compressed = self._compressing and self.plan.compresses(message, shape)
        self.compressed.append(compressed)
        return message, self.messages if compressed else self._dense

    def _disagreement(self, seen: int) -> RanksDisagree:
        return RanksDisagree(
            f"rank {self._rank} exchanged {seen} gradient messages with rank {self._peer_rank} ({self._peer}) in an "
            f"iteration whose schedule has {len(self._expected)}: this is another schedule than Megatron's 1F1B"
        )


class CompressedForward(Technique):
    """Compressed activations between pipeline stages, in 8 bits. The paper's forward messages are dense.

    A stage sends each activation as blocks without a residual, and the next stage computes with the decoded activation
    in the forward pass, in recomputation and in the backward pass. The gradient that returns is that of the decoded
    activation.
    """

    def __init__(self, config: OptimusConfig, traffic: TrafficClass, ring: Ring | None = None) -> None:
        super().__init__(config, traffic, ring)
        codec = self.new_codec()
        self.messages = None if codec is None else BlockMessages(codec, self.gauge)
        self._sends = self._receives = self.messages is not None
        self.seen = False
        """True if this rank has sent or received an activation."""

    def place(self, grid: Grid, layout: Layout, groups: NewGroups) -> None:
        """Decide for each direction whether this rank's activations are compressed."""
        if self.messages is not None:
            stage = grid.place.stage
            self._receives, self._sends = (
                _crosses(self.config, self.traffic, grid, groups.places, other % grid.stages)
                for other in (stage - 1, stage + 1)
            )

    def release(self) -> None:
        """Drop the messages."""
        self.messages = None

    @property
    def compresses(self) -> bool:
        """True if this rank's activations are compressed in this iteration."""
        return not self.dense and self.messages is not None

    def end(self) -> None:
        if self.messages is not None:
            self.messages.end()

    def unseen(self, applied_steps: int) -> str | None:
        if self.messages is None or self.seen:
            return None
        return (
            "no activation passed between stages by megatron-core's point-to-point calls, which "
            "pipeline_forward_format compresses. Leave it out with another communicator"
        )

    def transfers(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Transfer]:
        """Make the transfers that replace activations in one of Megatron's point-to-point calls, by role."""
        send_next, recv_prev = tensors["send_next"], tensors["recv_prev"]
        transfers = {}
        self.seen |= send_next is not None or recv_prev is not None
        messages = None if self.dense else self.messages
        if messages is not None and self._sends and send_next is not None:
            transfers["send_next"] = messages.send(send_next)
        if messages is not None and self._receives and recv_prev is not None:
            transfers["recv_prev"] = messages.receive(recv_prev)
        return transfers


def _crosses(
    config: OptimusConfig, traffic: TrafficClass, grid: Grid, places: Sequence[RankPlace], other: int
) -> bool:  # fmt: skip
    """Return whether messages between this rank's stage and the stage `other` are compressed. They are not if a preset
    alone asks for it and the stages share a node.
    """
    tensor = [grid.place.rank] if grid.tensor_group is None else dist.get_process_group_ranks(grid.tensor_group)
    return not stays_dense(config, traffic, places, hops_between(places, tensor, grid.place.stage, other))
