"""Compressed backpropagation with lazy error propagation (paper sections 5.1 and 5.2).

What a pipeline stage sends back to the one before it is the gradient of that stage's output: an n x m matrix
(n = sequence x micro-batch rows, m = hidden). Instead of it go P (n x r) and Q (m x r) of one step of power
iteration, packed into one message; what that leaves out is added to the link's next compressed message.

A link is one directed pair of stages. Its messages are numbered 0, 1, ... within an iteration, on both ends, by the
order in which they are sent and received; both ends decide from the same schedule, and in a warm-up from the same
iteration number, which of them are compressed.

Only P and Q are needed before a message can leave. What the link remembers of it (`SendingLink.remember`) is computed
after the message was posted, while it travels and the stage would else wait for it. Passes over memory of the
gradient's size beside the two products that read it (fp32 gradient and state):

    before the message leaves   M = G + E          read, read, write
    while it travels            E = M - arrived    read, write (in torch what arrives is written first, and read)
    once per iteration          the step counts    none on a CPU; on a GPU read, read, write
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimus_cc_ext.compressors import (
    LowRank,
    PackedFactors,
    Scratch,
    effective_rank,
    initial_q,
    next_warm_start,
    pays,
    private_generator,
)
from optimus_cc_ext.config import CompressedBackpropConfig
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.error_statistics import ErrorStatistics
from optimus_cc_ext.techniques.gauge import Gauge
from optimus_cc_ext.techniques.schedule import Message, Schedule
from optimus_cc_ext.techniques.stepped import SteppedTensor, note_finite

__all__ = ["Link", "LinkPlan", "ReceivingLink", "SendingLink"]


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """What both ends of a link know: enough to agree on every message without asking each other."""

    config: CompressedBackpropConfig
    sending_stage: int
    receiving_stage: int
    """The stage before, or with interleaving the last one for messages of stage 0."""

    seed: int
    state_dtype: torch.dtype = torch.float32
    """What the sender keeps residuals and warm starts in: float32 or bfloat16."""

    force: bool = False
    """Compress even where nothing is saved (tests)."""

    def compresses(self, message: Message, shape: torch.Size) -> bool:
        """Whether this message travels as [P | Q] once the warm-up is over."""
        rows, columns = matrix_shape(shape)
        worth_it = self.force or pays(rows, columns, self.config.compressed_backprop_rank)
        return worth_it and (self.config.compressed_backprop_messages == "all" or message.epilogue)

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
        self._expected: Sequence[Message] = ()
        self._compressing = True
        self.compressed: list[bool] = []
        """Of this iteration's messages so far, in order: whether it was compressed."""

        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}

    def begin_iteration(self, schedule: Schedule, *, compressing: bool = True) -> None:
        """Number the messages from 0 again. Without `compressing` all of them travel as they are: the warm-up."""
        self._expected = schedule.messages(self.plan.receiving_stage)
        self._compressing = compressing
        self.compressed = []

    def end_iteration(self) -> None:
        """Check that every message of the iteration has passed.

        Raises:
            RanksDisagree: messages are missing.
        """
        if len(self.compressed) != len(self._expected):
            raise self._disagreement(len(self.compressed))

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

    def _take_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """A message buffer for `tensor`; made only while more messages are in flight than ever before."""
        free = self._free.setdefault((tensor.shape, tensor.dtype), [])
        return free.pop() if free else self.plan.wire(tensor.shape, tensor.dtype).new_buffer(tensor.device)

    def _give_back(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        self._free[tensor.shape, tensor.dtype].append(buffer)


class _SendingState:
    """What one link remembers for one chunk's gradients: the residual and the warm start."""

    def __init__(self, plan: LinkPlan, chunk: int, like: torch.Tensor) -> None:
        rows, columns = matrix_shape(like.shape)
        compression_rank = plan.wire(like.shape, like.dtype).r
        # Neither the tensor-parallel nor the data-parallel rank goes into the seed: without sequence parallelism all
        # tensor-parallel ranks of a stage send the same gradient, and must go on sending the same approximation.
        generator = private_generator(
            plan.seed, "compressed-backprop", plan.sending_stage, chunk, rows, columns, device=like.device
        )
        factor = initial_q(1, columns, compression_rank, generator=generator, device=like.device)
        self.residual = SteppedTensor(torch.zeros(1, rows, columns, dtype=plan.state_dtype, device=like.device))
        self.warm_start = SteppedTensor(factor.to(plan.state_dtype, copy=True))
        self.fresh_directions = factor
        self.finite = torch.ones((), dtype=torch.bool, device=like.device)

    @property
    def nbytes(self) -> int:
        return self.residual.nbytes + self.warm_start.nbytes + self.fresh_directions.nbytes


@dataclass(frozen=True, slots=True)
class _Message:
    """A compressed message that has been, or will at once be, posted: what its sender has yet to remember."""

    state: _SendingState
    number: int
    matrix: torch.Tensor
    """Gradient plus residual (1, n, m), fp32: in the residual's workspace, which nobody else uses before the next."""

    p_wire: torch.Tensor
    q_wire: torch.Tensor
    """As they travel; views of the message, which is read from now on."""

    q: torch.Tensor
    """Q' in fp32, in scratch memory that lasts until the next message."""


class SendingLink(Link):
    """The end at stage s that compresses: M = G + E; P, Q of M; E = M - what the receiver will see."""

    peer_role = "the previous stage"

    def __init__(
        self,
        plan: LinkPlan,
        compressor: LowRank,
        rank: int,
        peer_rank: int,
        scratch: Scratch | None = None,
        gauge: Gauge | None = None,
    ) -> None:
        super().__init__(plan, rank, peer_rank)
        self._compressor = compressor
        self._scratch = scratch or Scratch()
        self._gauge = gauge or Gauge(self._scratch)
        self.statistics = ErrorStatistics()
        self._states: dict[tuple[int, torch.Size, torch.dtype], _SendingState] = {}
        self._unremembered: _Message | None = None
        self._loaded: dict[tuple[int, torch.Size, torch.dtype], dict[str, Any]] = {}
        """Of a checkpoint, until the first message of this chunk, shape and dtype makes the state."""

    def begin_iteration(self, schedule: Schedule, *, compressing: bool = True) -> None:
        self.remember()
        super().begin_iteration(schedule, compressing=compressing)
        # What a run with a shorter warm-up has left would be out of date when this one ends.
        if not compressing or self.plan.config.residual_across_iterations == "drop":
            for state in self._states.values():
                state.residual.zero_()

    def end_iteration(self) -> None:
        self.remember()
        super().end_iteration()

    @torch.no_grad()
    def send(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """The tensor to put on the wire for `gradient` (sequence, micro-batch, hidden), and what to call once sent.

        `gradient` is not changed, and not needed once this returned. The returned tensor is `gradient` itself where
        it is not compressed, else a flat [P | Q] in the gradient's dtype. Between posting and waiting for it is the
        time to `remember`; what is called once sent does it else, and so does all that depends on it.
        """
        self.remember()
        message, compressed = self._next(gradient.shape)
        if not compressed:
            self.statistics.no_error(len(self.compressed) - 1)
            return gradient, _nothing
        buffer = self._take_buffer(gradient)
        with self._gauge.timed(gradient.device):
            self._unremembered = self._compress(gradient, buffer, self._state_for(message.chunk, gradient))

        def sent() -> None:
            self.remember()
            self._give_back(gradient, buffer)

        return buffer, sent

    @torch.no_grad()
    def remember(self) -> None:
        """Compute residual and warm start from the last message, if that has not happened yet.

        It reads the message and scratch memory, not the gradient, which its owner may have freed. At most one message
        waits for it: the next one, the end of the iteration and every question about the state come after it.
        """
        message, self._unremembered = self._unremembered, None
        if message is not None:
            with self._gauge.timed(message.matrix.device):
                self._remember(message)

    @property
    def state_nbytes(self) -> int:
        """Bytes of residuals and factors."""
        return sum(state.nbytes for state in self._states.values())

    def expect(self, schedule: Schedule, like: torch.Tensor) -> None:
        """Make room for what an iteration will need, if its gradients have the shape, dtype and device of `like`."""
        for message in schedule.messages(self.plan.receiving_stage):
            if self.plan.compresses(message, like.shape):
                self._state_for(message.chunk, like)

    def residuals(self) -> list[torch.Tensor]:
        """The residual (rows, hidden) of every chunk and gradient shape that this link has compressed."""
        self.remember()
        return [state.residual.value[0] for state in self._states.values()]

    def commit(self, shrinkage: Mapping[str, float] | None = None) -> None:
        """The optimizer's step counted: keep what it put into residuals and warm starts, if it is finite.

        Args:
            shrinkage: by gradient-norm group, what residuals are multiplied by.
        """
        self.remember()
        factor = (shrinkage or {}).get(MAIN_NORM_GROUP, 1.0)
        for state in self._states.values():
            state.residual.commit(state.finite, factor)
            state.warm_start.commit(state.finite)
            state.finite.fill_(True)

    def rollback(self) -> None:
        """The step is repeated or skipped: forget what it put into residuals and warm starts."""
        self.remember()
        for state in self._states.values():
            state.residual.rollback()
            state.warm_start.rollback()
            state.finite.fill_(True)

    def follow_loss_scale(self, factor: torch.Tensor) -> None:
        """Gradients come multiplied by `factor`, a 0-dim tensor, compared to the last iteration's: so do residuals."""
        self.remember()
        for state in self._states.values():
            state.residual.rescale(factor)
        for loaded in self._loaded.values():
            loaded["residual"] = loaded["residual"].to(factor.device) * factor

    def state_dict(self) -> dict[str, Any]:
        """What the link remembers of steps that counted, as tensors (not copies), numbers and strings."""
        self.remember()
        made = {
            key: {"residual": state.residual.committed, "warm_start": state.warm_start.committed}
            for key, state in self._states.items()
        }
        return {
            "states": [
                {"chunk": chunk, "shape": list(shape), "dtype": str(dtype), **remembered}
                for (chunk, shape, dtype), remembered in (self._loaded | made).items()
            ]
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; what the link remembers is replaced.

        Raises:
            ValueError: it belongs to another compression rank; then nothing is changed.
        """
        if reason := self.mismatch(state_dict):
            raise ValueError(reason)
        self.remember()
        self._states.clear()
        # Copies: what was passed in may be the live state of another link.
        self._loaded = {
            _key_of(entry): {name: entry[name].clone() for name in ("residual", "warm_start")}
            for entry in state_dict["states"]
        }

    def mismatch(self, state_dict: dict[str, Any]) -> str | None:
        """Why `load_state_dict` would refuse, or None."""
        for entry in state_dict["states"]:
            _, shape, dtype = _key_of(entry)
            rows, columns = matrix_shape(shape)
            expected = (1, rows, columns), (1, columns, self.plan.wire(shape, dtype).r)
            found = tuple(entry["residual"].shape), tuple(entry["warm_start"].shape)
            if found != expected:
                return f"residual and warm start of {found} where a link has {expected}"
        return None

    def _compress(self, gradient: torch.Tensor, buffer: torch.Tensor, state: _SendingState) -> _Message:
        """Write [P | Q] of `gradient` plus the residual into `buffer`; no more than that, for the wire waits."""
        wire = self.plan.wire(gradient.shape, gradient.dtype)
        p_wire, q_wire = (factor.unsqueeze(0) for factor in wire.split(buffer))
        q = self._scratch.take("q", q_wire.shape, torch.float32, gradient.device)
        rows, residual = gradient.reshape(1, wire.n, wire.m), state.residual
        matrix = residual.workspace(self._scratch)
        carried = residual.value if self.plan.config.lazy_error_propagation else None
        p = self._scratch.take("p", p_wire.shape, torch.float32, gradient.device)
        self._compressor.project_sum(rows, carried, state.warm_start.value, total=matrix, out=p)
        self._compressor.orthogonalize(p, out=p)
        torch.mul(p, wire.scale, out=p_wire)
        self._compressor.back_project(matrix, p_wire, out=q)
        note_finite(state.finite, p_wire, self._scratch)
        # From P as it travels, rounded and scaled: so the scale is in Q once, and has to be taken out twice.
        torch.mul(q, wire.scale**-2, out=q_wire)
        return _Message(state, len(self.compressed) - 1, matrix, p_wire, q_wire, q)

    def _remember(self, message: _Message) -> None:
        state, matrix = message.state, message.matrix
        feedback = self.plan.config.lazy_error_propagation
        if feedback or self._gauge.on:
            self._gauge.note_compressed(matrix)
            # What `ReceivingLink` makes of the message, to the bit.
            self._compressor.subtract_reconstruction(matrix, message.p_wire, message.q_wire)
            self._gauge.note_error(matrix)
            self.statistics.error(message.number, matrix)
        if feedback:
            state.residual.write(matrix)
        q = message.q
        next_start = next_warm_start(q, state.fresh_directions, self._compressor, out=q, scratch=self._scratch)
        state.warm_start.write(next_start)

    def _state_for(self, chunk: int, gradient: torch.Tensor) -> _SendingState:
        # Chunks are different places of the model: the error of one says nothing about another's gradient.
        key = (chunk, gradient.shape, gradient.dtype)
        if key not in self._states:
            self._states[key] = state = _SendingState(self.plan, chunk, gradient)
            if loaded := self._loaded.pop(key, None):
                if self.plan.config.residual_across_iterations == "carry":
                    state.residual.restore(loaded["residual"])
                state.warm_start.restore(loaded["warm_start"])
        return self._states[key]


def _key_of(entry: dict[str, Any]) -> tuple[int, torch.Size, torch.dtype]:
    """The chunk, gradient shape and dtype that an entry of a link's state dict is for."""
    return entry["chunk"], torch.Size(entry["shape"]), getattr(torch, entry["dtype"].removeprefix("torch."))


class ReceivingLink(Link):
    """The end at stage s - 1 that decompresses. It remembers nothing between messages."""

    peer_role = "the next stage"

    def __init__(
        self, plan: LinkPlan, compressor: LowRank, rank: int, peer_rank: int, gauge: Gauge | None = None
    ) -> None:
        super().__init__(plan, rank, peer_rank)
        self._compressor = compressor
        self._gauge = gauge or Gauge()

    def receive(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """The tensor to receive into, for the gradient that `gradient` waits for, and what to call once received."""
        _, compressed = self._next(gradient.shape)
        if not compressed:
            return gradient, _nothing
        buffer = self._take_buffer(gradient)

        def finish() -> None:
            wire = self.plan.wire(gradient.shape, gradient.dtype)
            p_wire, q_wire = (factor.unsqueeze(0) for factor in wire.split(buffer))
            with self._gauge.timed(gradient.device):
                self._compressor.reconstruct(p_wire, q_wire, out=gradient.view(1, wire.n, wire.m))
            self._give_back(gradient, buffer)

        return buffer, finish


def _nothing() -> None:
    return None
