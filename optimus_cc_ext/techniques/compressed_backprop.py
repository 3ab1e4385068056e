"""Compressed backpropagation with lazy error propagation (paper sections 5.1 and 5.2).

In another format than low-rank a gradient travels as blocks in few bits (`block_messages`). What these leave out is
remembered on demand, within an iteration, so that neither checkpoints nor repeated steps know of it.

As low-rank: what a pipeline stage sends back to the one before it is the gradient of that stage's output: an n x m
matrix (n = sequence x micro-batch rows, m = hidden). Instead of it go P (n x r) and Q (m x r) of one step of power
iteration, packed into one message; what that leaves out is added to the link's next compressed message.

    1. M = G + E                          before the message is posted
    2. P = orth(M Q)
    3. Q' = M^T P, and [P | Q'] is posted
    4. E = M - P Q'^T                     while it travels
    5. Q = orth(Q')                       for the next message

With `--low-rank-wire int8` P and Q' are those that the blocks of the message say, on both ends.

A link is one directed pair of stages. Its messages are numbered 0, 1, ... within an iteration, on both ends, by the
order in which they are sent and received; both ends decide from the same schedule, and in a warm-up from the same
iteration number, which of them are compressed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.low_rank import LowRank, PackedFactors
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import CompressedBackpropConfig
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.metrics.error_statistics import ErrorStatistics
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.block_messages import BlockMessages
from optimus_cc_ext.techniques.factor_state import FactorState, FactorStates
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.link_plan import LinkPlan, matrix_shape
from optimus_cc_ext.techniques.schedule import Message, Schedule
from optimus_cc_ext.techniques.technique import Iteration, Technique
from optimus_cc_ext.techniques.transfer import MessageBuffers, Transfer

__all__ = ["CompressedBackprop", "Link", "ReceivingLink", "SendingLink"]


class CompressedBackprop(Technique):
    """Both links of this rank: to the stage before it, and from the one after it."""

    def __init__(
        self,
        config: CompressedBackpropConfig,
        compressor: LowRank,
        *,
        codec: Codec | None = None,
        factor_codec: Codec | None = None,
        seed: int,
        state_dtype: torch.dtype,
        force: bool = False,
        error_statistics: bool = False,
    ) -> None:
        self._scratch = Scratch()
        super().__init__(
            "compressed_backprop",
            on=config.backprop_remembers,
            states=FactorStates(config.compressed_backprop_rank, made_on_demand=True),
            gauge=Gauge(self._scratch),
        )
        self._config, self._seed, self._state_dtype, self._force = config, seed, state_dtype, force
        self.compressor, self._codec, self._factor_codec = compressor, codec, factor_codec
        self.statistics = ErrorStatistics()
        self._wants_statistics = error_statistics
        self.sending: SendingLink | None = None
        self.receiving: ReceivingLink | None = None

    def place(self, grid: Grid) -> None:
        """Make the links that a rank at this place has."""
        if not self._config.compressed_backprop:
            return
        assert grid.pipeline_group is not None, "the model has no pipeline"
        ranks, stage = dist.get_process_group_ranks(grid.pipeline_group), grid.place.stage
        before, after = (stage - 1) % grid.stages, (stage + 1) % grid.stages
        # With interleaving the first stage sends gradients too: to an earlier chunk, on the last stage.
        if stage > 0 or grid.chunks > 1:
            self.connect_to(before, stage, grid.place.rank, ranks[before])
        if stage < grid.stages - 1 or grid.chunks > 1:
            plan = self._plan(sending_stage=after, receiving_stage=stage)
            self.receiving = ReceivingLink(plan, self.compressor, grid.place.rank, ranks[after], self.gauge)

    def connect_to(self, receiving_stage: int, sending_stage: int, rank: int, peer_rank: int) -> None:
        """Make the link on which this rank sends."""
        self.sending = SendingLink(
            self._plan(sending_stage=sending_stage, receiving_stage=receiving_stage), self.compressor, rank, peer_rank,
            states=self.states, scratch=self._scratch, gauge=self.gauge, statistics=self.statistics,
        )  # fmt: skip

    def _plan(self, *, sending_stage: int, receiving_stage: int) -> "LinkPlan":
        return LinkPlan(
            config=self._config, sending_stage=sending_stage, receiving_stage=receiving_stage, seed=self._seed,
            state_dtype=self._state_dtype, codec=self._codec, factor_codec=self._factor_codec, force=self._force,
        )  # fmt: skip

    def preallocate(self, schedule: Schedule, like: torch.Tensor) -> None:
        """Make the states of an iteration whose gradients have the shape, dtype and device of `like`."""
        if self.sending is not None:
            self.sending.preallocate(schedule, like)

    def begin(self, this: Iteration) -> None:
        """See `Technique.begin`."""
        super().begin(this)
        self.statistics.begin(this.measured and self._wants_statistics)
        compressing = not this.is_among_the_first(self._config.compressed_backprop_warmup)
        # What a run with a shorter warm-up has left would be out of date when this one ends.
        if not compressing or self._config.residual_across_iterations == "drop":
            self.states.zero_residuals()
        for link in self._links():
            link.begin(this.schedule, compressing=compressing)

    def end(self) -> None:
        """See `Technique.end`."""
        for link in self._links():
            link.end()

    def transfers(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Transfer]:
        """What takes the place of the tensors of one of Megatron's point-to-point calls, where anything does.

        Args:
            tensors: by role: `send_prev`, `recv_prev`, `send_next`, `recv_next`; (sequence, micro-batch, hidden) each.
        """
        send_prev, recv_next, recv_prev = (tensors[role] for role in ("send_prev", "recv_next", "recv_prev"))
        transfers = {}
        if send_prev is not None and self.sending is not None:
            transfers["send_prev"] = self.sending.send(send_prev)
        if recv_next is not None and self.receiving is not None:
            transfers["recv_next"] = self.receiving.receive(recv_next)
        if recv_prev is not None and self.statistics.on:
            transfers["recv_prev"] = Transfer(recv_prev, after_wait=partial(self.statistics.activation, recv_prev))
        return transfers

    def mismatch(self, state_dict: Mapping[str, Any]) -> str | None:
        """See `Technique.mismatch`."""
        if state_dict.get("states") and self.sending is None:
            return "this rank sends no compressed messages"
        return super().mismatch(state_dict)

    def _links(self) -> list["Link"]:
        return [link for link in (self.sending, self.receiving) if link is not None]


class Link:
    """One end of a link: the message counter, the log of decisions, and the buffers for messages in flight."""

    peer_role = "the other end"

    def __init__(self, plan: LinkPlan, compressor: LowRank, rank: int, peer_rank: int, gauge: Gauge | None) -> None:
        self.plan = plan
        self._compressor, self._gauge = compressor, gauge or Gauge()
        self._rank, self._peer_rank = rank, peer_rank
        self._expected: Sequence[Message] = ()
        self._compressing = True
        self.compressed: list[bool] = []
        """Of this iteration's messages so far, in order: whether it was compressed."""

        self._buffers = MessageBuffers()
        self._blocks = None if plan.codec is None else BlockMessages(plan.codec, self._gauge)
        # What they leave out is part of what low rank does, which is noted as a whole.
        self._coded = None if plan.factor_codec is None else BlockMessages(plan.factor_codec)

    def message_bytes(self, gradient: torch.Tensor) -> int:
        """Bytes of a compressed message, of a gradient of this shape and dtype."""
        if self._blocks is not None:
            return self._blocks.nbytes(gradient)
        return self.plan.factor_bytes(gradient.shape, gradient.dtype)

    def begin(self, schedule: Schedule, *, compressing: bool = True) -> None:
        """Number the messages from 0 again. Without `compressing` all of them travel as they are: the warm-up."""
        self._expected = schedule.messages(self.plan.receiving_stage)
        self._compressing = compressing
        self.compressed = []

    def end(self) -> None:
        """Check that every message of the iteration has passed, and wait for those that are still being sent.

        Raises:
            RanksDisagree: more or fewer messages passed than the schedule has.
            OptimusError: a message could not be sent.
        """
        if len(self.compressed) != len(self._expected):
            raise self._disagreement(len(self.compressed))
        self._buffers.settle()
        for messages in (self._blocks, self._coded):
            if messages is not None:
                messages.settle()

    def _next(self, shape: torch.Size) -> tuple[Message, bool]:
        """The message that passes now, and whether it is compressed."""
        if len(self.compressed) == len(self._expected):
            raise self._disagreement(len(self.compressed) + 1)
        message = self._expected[len(self.compressed)]
        self.compressed.append(self._compressing and self.plan.compresses(message, shape))
        return message, self.compressed[-1]

    def _disagreement(self, seen: int) -> RanksDisagree:
        return RanksDisagree(
            f"rank {self._rank} exchanged {seen} gradient messages with rank {self._peer_rank} ({self.peer_role}) in "
            f"an iteration whose schedule has {len(self._expected)}: this is another schedule than Megatron's 1F1B"
        )


class SendingLink(Link):
    """The end at stage s that compresses, and remembers what the receiver will not see."""

    peer_role = "the previous stage"

    def __init__(
        self,
        plan: LinkPlan,
        compressor: LowRank,
        rank: int,
        peer_rank: int,
        *,
        states: FactorStates | None = None,
        scratch: Scratch | None = None,
        gauge: Gauge | None = None,
        statistics: ErrorStatistics | None = None,
    ) -> None:
        super().__init__(plan, compressor, rank, peer_rank, gauge)
        self._scratch = scratch or Scratch()
        self.states = states or FactorStates(plan.config.compressed_backprop_rank, made_on_demand=True)
        self._statistics = statistics or ErrorStatistics()
        self._residuals: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        """Of blocks, by chunk, length and dtype of the messages."""

    def begin(self, schedule: Schedule, *, compressing: bool = True) -> None:
        """See `Link.begin`."""
        super().begin(schedule, compressing=compressing)
        for residual in self._residuals.values():
            residual.zero_()

    @torch.no_grad()
    def send(self, gradient: torch.Tensor) -> Transfer:
        """What travels instead of `gradient` (sequence, micro-batch, hidden), which is not changed.

        A flat [P | Q] in the gradient's dtype, blocks, or the gradient itself. The gradient is not needed after this,
        for its owner may free it; scratch memory is, until `after_post` was called, which has to be before the next
        `send`.
        """
        message, compressed = self._next(gradient.shape)
        number = len(self.compressed) - 1
        if not compressed:
            self._statistics.no_error(number)
            return Transfer(gradient)
        if self._blocks is not None:
            return self._blocks.send(gradient, self._residual(message.chunk, gradient))
        state, wire = self._state_for(message.chunk, gradient), self.plan.wire(gradient.shape, gradient.dtype)
        buffer = self._buffers.take(wire.numel, gradient.dtype, gradient.device)
        p_wire, q_wire = (factor.unsqueeze(0) for factor in wire.split(buffer))
        with self._gauge.timed(gradient.device):
            matrix, q = self._compress(gradient, wire, state, p_wire, q_wire)
        remember = partial(self._remember, state, number, matrix, q, p_wire, q_wire)
        if self._coded is None:
            return Transfer(
                buffer, after_post=remember, after_wait=partial(self._buffers.give_back, buffer),
                park=partial(self._buffers.park, buffer),
            )  # fmt: skip
        with self._gauge.timed(gradient.device):
            sent = self._coded.send(buffer)
        return replace(sent, after_post=partial(self._decode_and, remember, sent.tensor, buffer))

    def _decode_and(self, remember: Callable[[], None], message: torch.Tensor, buffer: torch.Tensor) -> None:
        """Put what the receiver will see in the place of P and Q, and remember that."""
        assert self._coded is not None
        with self._gauge.timed(buffer.device):
            self._coded.read(message, buffer)
        remember()
        self._buffers.give_back(buffer)

    def _compress(
        self,
        gradient: torch.Tensor,
        wire: PackedFactors,
        state: FactorState,
        p_wire: torch.Tensor,
        q_wire: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the message, and no more than that, for the wire waits. Returns M (1, n, m) and Q' (1, m, r), fp32."""
        matrix = state.residual.workspace(self._scratch)
        carried = state.residual.value if self.plan.config.lazy_error_propagation else None
        p = self._scratch.take("p", p_wire.shape, torch.float32, gradient.device)
        q = self._scratch.take("q", q_wire.shape, torch.float32, gradient.device)
        rows = gradient.reshape(1, wire.n, wire.m)
        self._compressor.project_sum(rows, carried, state.warm_start.value, total=matrix, out=p)
        self._compressor.orthogonalize(p, out=p)
        torch.mul(p, wire.scale, out=p_wire)
        state.note_finite(p_wire, self._scratch)
        self._compressor.back_project(matrix, p_wire, out=q)
        # From P as it travels, rounded and scaled: so the scale is in Q once, and has to be taken out twice.
        torch.mul(q, wire.scale**-2, out=q_wire)
        return matrix, q

    @torch.no_grad()
    def _remember(
        self,
        state: FactorState,
        number: int,
        matrix: torch.Tensor,
        q: torch.Tensor,
        p_wire: torch.Tensor,
        q_wire: torch.Tensor,
    ) -> None:
        """Residual and warm start from the message as it travels."""
        with self._gauge.timed(matrix.device):
            feedback = self.plan.config.lazy_error_propagation
            if feedback or self._gauge.on:
                self._gauge.note_compressed(matrix)
                # What `ReceivingLink` makes of the message, to the bit.
                self._compressor.subtract_reconstruction(matrix, p_wire, q_wire)
                self._gauge.note_error(matrix)
                self._statistics.error(number, matrix)
            if feedback:
                state.residual.write(matrix)
            state.write_warm_start(q, self._compressor, self._scratch)

    def preallocate(self, schedule: Schedule, like: torch.Tensor) -> None:
        """See `CompressedBackprop.preallocate`."""
        for message in schedule.messages(self.plan.receiving_stage):
            if self.plan.compresses(message, like.shape):
                of = self._state_for if self._blocks is None else self._residual
                of(message.chunk, like)

    def _residual(self, chunk: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """What blocks of this shape have left out of this chunk's gradients in this iteration; flat."""
        if not self.plan.config.lazy_error_propagation:
            return None
        key = chunk, gradient.numel(), gradient.dtype
        if key not in self._residuals:
            self._residuals[key] = torch.zeros(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
        return self._residuals[key]

    def _state_for(self, chunk: int, gradient: torch.Tensor) -> FactorState:
        # Chunks are different places of the model: the error of one says nothing about another's gradient.
        sizes, dtype = "x".join(map(str, gradient.shape)), str(gradient.dtype).removeprefix("torch.")
        return self.states.get(f"chunk {chunk}: {sizes} {dtype}", lambda: self._new_state(chunk, gradient))

    def _new_state(self, chunk: int, gradient: torch.Tensor) -> FactorState:
        rows, columns = matrix_shape(gradient.shape)
        # Neither the tensor-parallel nor the data-parallel rank goes into the seed: without sequence parallelism all
        # tensor-parallel ranks of a stage send the same gradient, and must go on sending the same approximation.
        generator = private_generator(
            self.plan.seed, "compressed-backprop", self.plan.sending_stage, chunk, rows, columns, device=gradient.device
        )
        return FactorState(
            (1, rows, columns), self.plan.config.compressed_backprop_rank, generator=generator,
            dtype=self.plan.state_dtype, device=gradient.device,
        )  # fmt: skip


class ReceivingLink(Link):
    """The end at stage s - 1 that decompresses. It remembers nothing between messages."""

    peer_role = "the next stage"

    def __init__(
        self, plan: LinkPlan, compressor: LowRank, rank: int, peer_rank: int, gauge: Gauge | None = None
    ) -> None:
        super().__init__(plan, compressor, rank, peer_rank, gauge)

    def receive(self, gradient: torch.Tensor) -> Transfer:
        """What is received into instead of `gradient`, which is written once that has arrived."""
        _, compressed = self._next(gradient.shape)
        if not compressed:
            return Transfer(gradient)
        if self._blocks is not None:
            return self._blocks.receive(gradient)
        wire = self.plan.wire(gradient.shape, gradient.dtype)
        buffer = self._buffers.take(wire.numel, gradient.dtype, gradient.device)
        arriving = Transfer(buffer) if self._coded is None else self._coded.receive(buffer)
        return arriving.then(partial(self._decompress, buffer, gradient))

    def _decompress(self, buffer: torch.Tensor, gradient: torch.Tensor) -> None:
        wire = self.plan.wire(gradient.shape, gradient.dtype)
        p_wire, q_wire = (factor.unsqueeze(0) for factor in wire.split(buffer))
        with self._gauge.timed(gradient.device):
            self._compressor.reconstruct(p_wire, q_wire, out=gradient.view(1, wire.n, wire.m))
        self._buffers.give_back(buffer)
