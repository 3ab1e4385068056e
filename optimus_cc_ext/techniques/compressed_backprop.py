"""Compressed backpropagation with lazy error propagation (paper sections 5.1 and 5.2).

What a pipeline stage sends back to the one before it is the gradient of that stage's output: an n x m matrix
(n = sequence x micro-batch rows, m = hidden). Instead of it go P (n x r) and Q (m x r) of one step of power
iteration, packed into one message; what that leaves out is added to the link's next compressed message.

A link is one directed pair of neighbouring stages. Its messages are numbered 0, 1, ... within an iteration, on
both ends, by the order in which they are sent and received; both ends decide from the same numbers which of them
are compressed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from optimus_cc_ext.compressors import (
    LowRank,
    PackedFactors,
    effective_rank,
    initial_factor,
    next_warm_start,
    pays,
    private_generator,
)
from optimus_cc_ext.config import CompressedBackpropConfig
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.techniques.stepped import SteppedTensor

__all__ = ["Link", "LinkPlan", "ReceivingLink", "SendingLink", "is_epilogue"]


def is_epilogue(stages: int, micro_batches: int, sending_stage: int, message: int) -> bool:
    """Whether a gradient message of non-interleaved 1F1B falls into the receiver's cooldown.

    In its cooldown the receiving stage has no forward pass left to hide the transfer. Its cooldown is as long as
    its warm-up: min(stages - 1 - receiving stage, micro_batches) messages, and receiving stage = sending stage - 1.

    Args:
        stages: pipeline stages P.
        micro_batches: M of this iteration.
        sending_stage: stage s >= 1 that sends the gradient to s - 1.
        message: index 0 .. M - 1 of the message on that link.
    """
    return message >= micro_batches - min(stages - sending_stage, micro_batches)


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """What both ends of a link know: enough to agree on every message without asking each other."""

    config: CompressedBackpropConfig
    stages: int
    sending_stage: int
    seed: int
    force: bool = False
    """Compress even where nothing is saved (tests)."""

    def compresses(self, micro_batches: int, message: int, shape: torch.Size) -> bool:
        """Whether this message travels as [P | Q]."""
        rows, columns = matrix_shape(shape)
        worth_it = self.force or pays(rows, columns, self.config.compressed_backprop_rank)
        in_turn = self.config.compressed_backprop_messages == "all" or is_epilogue(
            self.stages, micro_batches, self.sending_stage, message
        )
        return worth_it and in_turn

    def wire(self, shape: torch.Size, dtype: torch.dtype) -> PackedFactors:
        """The layout of the compressed message for a gradient of this shape and dtype."""
        rows, columns = matrix_shape(shape)
        return PackedFactors(rows, columns, effective_rank(rows, columns, self.config.compressed_backprop_rank), dtype)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """The matrix that a gradient of shape (sequence, micro-batch, hidden) is compressed as: all rows by hidden."""
    columns = shape[-1]
    return shape.numel() // columns, columns


class Link:
    """One end of a link: the message counter, the log of decisions, and the buffers for messages in flight."""

    peer_role = "the other end"

    def __init__(self, plan: LinkPlan, rank: int, peer_rank: int) -> None:
        self.plan = plan
        self._rank, self._peer_rank = rank, peer_rank
        self._micro_batches = 0
        self.compressed: list[bool] = []
        """Of this iteration's messages so far, in order: whether it was compressed."""

        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}

    def begin_iteration(self, micro_batches: int) -> None:
        """Number the messages from 0 again; `micro_batches` of them will come."""
        self._micro_batches = micro_batches
        self.compressed = []

    def end_iteration(self) -> None:
        """Check that every message of the iteration has passed.

        Raises:
            RanksDisagree: fewer or more messages passed than there were micro-batches.
        """
        if len(self.compressed) != self._micro_batches:
            raise RanksDisagree(
                f"rank {self._rank} exchanged {len(self.compressed)} gradient messages with rank "
                f"{self._peer_rank} ({self.peer_role}) in an iteration of {self._micro_batches} micro-batches; "
                "this schedule is not non-interleaved 1F1B"
            )

    def _next_is_compressed(self, shape: torch.Size) -> bool:
        compressed = self.plan.compresses(self._micro_batches, len(self.compressed), shape)
        self.compressed.append(compressed)
        return compressed

    def _take_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """A message buffer for `tensor`; made only while more messages are in flight than ever before."""
        free = self._free.setdefault((tensor.shape, tensor.dtype), [])
        return free.pop() if free else self.plan.wire(tensor.shape, tensor.dtype).new_buffer(tensor.device)

    def _give_back(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        self._free[tensor.shape, tensor.dtype].append(buffer)


class _SendingState:
    """What one link remembers for gradients of one shape: the residual and the warm start, both in fp32."""

    def __init__(self, plan: LinkPlan, like: torch.Tensor) -> None:
        rows, columns = matrix_shape(like.shape)
        compression_rank = plan.wire(like.shape, like.dtype).r
        # Neither the tensor-parallel nor the data-parallel rank goes into the seed: without sequence parallelism all
        # tensor-parallel ranks of a stage send the same gradient, and must go on sending the same approximation.
        generator = private_generator(
            plan.seed, "compressed-backprop", plan.sending_stage, rows, columns, device=like.device
        )
        factor = initial_factor(1, columns, compression_rank, generator=generator, device=like.device)
        self.residual = SteppedTensor(torch.zeros(1, rows, columns, device=like.device))
        self.warm_start = SteppedTensor(factor.clone())
        self.fresh_directions = factor
        self.finite = torch.ones((), dtype=torch.bool, device=like.device)
        self.decompressed = torch.empty(1, rows, columns, dtype=like.dtype, device=like.device)


class SendingLink(Link):
    """The end at stage s that compresses: M = G + E; P, Q of M; E = M - what the receiver will see."""

    peer_role = "the previous stage"

    def __init__(self, plan: LinkPlan, compressor: LowRank, rank: int, peer_rank: int) -> None:
        super().__init__(plan, rank, peer_rank)
        self._compressor = compressor
        self._states: dict[tuple[torch.Size, torch.dtype], _SendingState] = {}

    def begin_iteration(self, micro_batches: int) -> None:
        super().begin_iteration(micro_batches)
        if self.plan.config.residual_across_iterations == "drop":
            for state in self._states.values():
                state.residual.zero_()

    @torch.no_grad()
    def send(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """The tensor to put on the wire for `gradient` (sequence, micro-batch, hidden), and what to call once sent.

        `gradient` is not changed. The returned tensor is `gradient` itself where it is not compressed, else a flat
        [P | Q] in the gradient's dtype.
        """
        if not self._next_is_compressed(gradient.shape):
            return gradient, _nothing
        buffer = self._take_buffer(gradient)
        self._compress(gradient, buffer)
        return buffer, lambda: self._give_back(gradient, buffer)

    def residuals(self) -> list[torch.Tensor]:
        """The residual (rows, hidden) in fp32 of every gradient shape that this link has compressed."""
        return [state.residual.value[0] for state in self._states.values()]

    def commit(self) -> None:
        """The optimizer's step counted: keep what it put into residuals and warm starts, if it is finite."""
        for state in self._states.values():
            state.residual.commit(state.finite)
            state.warm_start.commit(state.finite)
            state.finite.fill_(True)

    def rollback(self) -> None:
        """The step is repeated or skipped: forget what it put into residuals and warm starts."""
        for state in self._states.values():
            state.residual.rollback()
            state.warm_start.rollback()
            state.finite.fill_(True)

    def _compress(self, gradient: torch.Tensor, buffer: torch.Tensor) -> None:
        state = self._state_for(gradient)
        wire = self.plan.wire(gradient.shape, gradient.dtype)
        p_wire, q_wire = (factor.unsqueeze(0) for factor in wire.split(buffer))
        rows = gradient.reshape(1, wire.n, wire.m)

        matrix = state.residual.pending
        if self.plan.config.lazy_error_propagation:
            torch.add(state.residual.value, rows, out=matrix)
        else:
            matrix.copy_(rows)
        p = self._compressor.project(matrix, state.warm_start.value)
        state.finite &= torch.isfinite(p).all()
        self._compressor.orthogonalize(p, out=p_wire)
        q = self._compressor.back_project(matrix, p_wire)
        q_wire.copy_(q)

        if self.plan.config.lazy_error_propagation:
            decompress(self._compressor, p_wire, q_wire, out=state.decompressed)
            matrix -= state.decompressed
            state.residual.wrote()
        state.warm_start.pending.copy_(next_warm_start(q, state.fresh_directions, self._compressor))
        state.warm_start.wrote()

    def _state_for(self, gradient: torch.Tensor) -> _SendingState:
        key = (gradient.shape, gradient.dtype)
        if key not in self._states:
            self._states[key] = _SendingState(self.plan, gradient)
        return self._states[key]


class ReceivingLink(Link):
    """The end at stage s - 1 that decompresses. It remembers nothing between messages."""

    peer_role = "the next stage"

    def __init__(self, plan: LinkPlan, compressor: LowRank, rank: int, peer_rank: int) -> None:
        super().__init__(plan, rank, peer_rank)
        self._compressor = compressor

    def receive(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """The tensor to receive into, for the gradient that `gradient` waits for, and what to call once received."""
        if not self._next_is_compressed(gradient.shape):
            return gradient, _nothing
        buffer = self._take_buffer(gradient)

        def finish() -> None:
            wire = self.plan.wire(gradient.shape, gradient.dtype)
            p_wire, q_wire = (factor.unsqueeze(0) for factor in wire.split(buffer))
            decompress(self._compressor, p_wire, q_wire, out=gradient.view(1, wire.n, wire.m))
            self._give_back(gradient, buffer)

        return buffer, finish


@torch.no_grad()
def decompress(compressor: LowRank, p_wire: torch.Tensor, q_wire: torch.Tensor, out: torch.Tensor) -> None:
    """Write what the receiver makes of P (1, n, r) and Q (1, m, r) into `out` (1, n, m); all in the wire's dtype.

    The one function that both ends use, so that the sender's residual is computed from exactly what arrives.
    """
    if out.dtype == torch.float32:
        compressor.reconstruct(p_wire, q_wire, out=out)
    else:
        out.copy_(compressor.reconstruct(p_wire, q_wire))


def _nothing() -> None:
    return None
