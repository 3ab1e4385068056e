"""Messages between pipeline stages, in three kinds: dense tensors, blocks in few bits, and low-rank factors.

Each end of a link has one object for its kind of message. It makes the buffer that is posted in place of a tensor
(`Transfer`), and writes the tensor from the buffer that has arrived. Both ends know a message's length from the
tensor's shape and dtype.

In low rank, the gradient of a stage's output is an n x m matrix (n = sequence x micro-batch rows, m = hidden). It is
replaced by P (n x r) and Q (m x r) of one step of power iteration, packed into one message; the residual is added to
the link's next compressed message.

    1. M = G + E                          before the message is posted
    2. P = orth(M Q)
    3. Q' = M^T P, and [P | Q'] is posted
    4. E = M - P Q'^T                     during the transfer
    5. Q = orth(Q')                       for the next message
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import torch

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import block_format, format_named
from optimus_cc_ext.compressors.low_rank import LowRank, PackedFactors, effective_rank, pays
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.metrics.error_statistics import ErrorStatistics
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.schedule import Message
from optimus_cc_ext.techniques.state import FactorState, FactorStates, state_dtype
from optimus_cc_ext.techniques.transfer import MessageBuffers, Recent, Transfer

_MOST_LAYOUTS, _MOST_SHAPES = 16, 4
"""Largest numbers of layouts of a link, and of shapes of which a model chunk keeps residuals. Only messages of variable
sequence lengths have more: the longest unused one is forgotten, and made again where it is needed."""


@dataclass(frozen=True)
class LinkPlan:
    """Facts that both ends of a link know, which are enough to agree on every message without communication.

    It holds names of formats and numbers, no codec and no tensor, so that the planner can compute the bytes of a run.
    """

    config: OptimusConfig
    sending_stage: int
    receiving_stage: int
    """Receiver of the link's messages: the stage before, or with interleaving the last stage for messages of stage
    0.
    """

    @property
    def is_low_rank(self) -> bool:
        """True if compressed messages are low-rank factors."""
        return self.config.compressed_backprop_format == "low-rank"

    def compresses(self, message: Message, shape: torch.Size) -> bool:
        """Return whether this message is compressed, once the warm-up is over."""
        if not message.epilogue and self.config.compressed_backprop_messages == "epilogue":
            return False
        pays_off = not self.is_low_rank or pays(*_matrix_shape(shape), self.config.compressed_backprop_rank)
        return pays_off or self.config._force_compression

    def factors(self, shape: torch.Size, dtype: torch.dtype) -> PackedFactors:
        """Return the layout of the factors of a low-rank message for a gradient of this shape and dtype."""
        rows, columns = _matrix_shape(shape)
        return PackedFactors(rows, columns, effective_rank(rows, columns, self.config.compressed_backprop_rank), dtype)

    def message_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the bytes of a compressed message for a gradient of this shape and dtype."""
        numel = self.factors(shape, dtype).numel if self.is_low_rank else shape.numel()
        return message_bytes(self.config.compressed_backprop_format, numel, dtype)


def message_bytes(format: str, numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a message of `numel` values of this dtype, in a block format, or as they are."""
    blocks = block_format(format)
    if blocks is None:
        return numel * dtype.itemsize
    return BlockLayout.of_one(numel).sections(format_named(blocks).code_bytes, dtype.itemsize)[-1]


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return (rows, columns) of a (sequence, micro-batch, hidden) tensor as a matrix: all rows by hidden."""
    columns = shape[-1]
    return shape.numel() // columns, columns


class DenseMessages:
    """Messages that are dense tensors; also the base class of all kinds of messages."""

    def __init__(self, statistics: ErrorStatistics) -> None:
        self._buffers, self._statistics = MessageBuffers(), statistics

    def begin(self) -> None:
        """Start an iteration: zero residuals that last for one iteration only."""

    def end(self) -> None:
        """End an iteration: wait for the messages that are still being sent. Raises OptimusError if one could not
        be sent.
        """
        self._buffers.settle()

    def preallocate(self, like: torch.Tensor, chunk: int) -> None:
        """Allocate the state for tensors of the shape, dtype and device of `like`, sent by this model chunk."""

    def send(self, tensor: torch.Tensor, chunk: int = 0, number: int = 0) -> Transfer:
        """Make the transfer that sends `tensor`, which is not changed.

        A compressed tensor is not needed after this call, because its owner may free it. Scratch memory is needed until
        `after_post` has been called, which has to be before the next `send`.

        Args:
            chunk: the model chunk of the tensor; each chunk has a residual of its own.
            number: index of the message in the iteration.
        """
        self._statistics.no_error(number)
        return Transfer(tensor)

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """Make the transfer that receives `tensor`, contiguous, which is written once the message has arrived."""
        return Transfer(tensor)


class BlockMessages(DenseMessages):
    """Messages of tensors as blocks in few bits.

    A tensor of any shape is encoded as one flat run of blocks, which lie along the hidden dimension if its size is a
    multiple of 128. Residuals last for one iteration, so that they concern neither checkpoints nor repeated steps.

    Args:
        residual: add the compression error of a message to the next message of the same chunk, length and dtype.
    """

    def __init__(self, codec: Codec, gauge: Gauge, *, residual: bool = False) -> None:
        super().__init__(ErrorStatistics())
        self._codec, self._gauge, self._has_residuals = codec, gauge, residual
        self._layouts = Recent[tuple[int, torch.dtype], tuple[BlockLayout, int]](_MOST_LAYOUTS)
        """Layout and bytes of the message of a tensor, by its length and dtype."""

        self._residuals = defaultdict[int, Recent[tuple[int, torch.dtype], torch.Tensor]](lambda: Recent(_MOST_SHAPES))
        """Residuals of each model chunk: one flat tensor for each length and dtype."""

    def begin(self) -> None:
        for residuals in self._residuals.values():
            for residual in residuals.values():
                residual.zero_()

    def preallocate(self, like: torch.Tensor, chunk: int) -> None:
        self._residual(like, chunk)

    @torch.no_grad()
    def send(self, tensor: torch.Tensor, chunk: int = 0, number: int = 0) -> Transfer:
        """Make the transfer of the encoded tensor; `DenseMessages.send` has the arguments."""
        (layout, message), values = self._message(tensor), tensor.detach().reshape(-1)
        residual = self._residual(tensor, chunk) if self._has_residuals else None
        with self._gauge.timed(tensor.device):
            if residual is not None:
                values = residual.add_(values)
            self._codec.encode(values, layout, message)
        if self._gauge.on:
            self._codec.errors(values, layout, message, self._gauge.note)
        sent = self._buffers.sending(message)
        if residual is None:
            return sent
        return replace(sent, after_post=partial(self._remember, message, layout, residual))

    @torch.no_grad()
    def _remember(self, message: torch.Tensor, layout: BlockLayout, residual: torch.Tensor) -> None:
        """Subtract the values that the receiver decodes from the encoded ones, in the residual."""
        arrives = self._buffers.take(residual.numel(), residual.dtype, residual.device)
        with self._gauge.timed(residual.device):
            self._codec.decode(message, layout, arrives)
            residual.sub_(arrives)
        self._buffers.give_back(arrives)

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """Make the transfer that decodes a message into `tensor`."""
        layout, message = self._message(tensor)
        return Transfer(message, after_wait=partial(self._arrived, message, layout, tensor))

    @torch.no_grad()
    def _arrived(self, message: torch.Tensor, layout: BlockLayout, tensor: torch.Tensor) -> None:
        with self._gauge.timed(tensor.device):
            self._codec.decode(message, layout, tensor.detach().view(-1))
        self._buffers.give_back(message)

    def _layout(self, tensor: torch.Tensor) -> tuple[BlockLayout, int]:
        def new() -> tuple[BlockLayout, int]:
            layout = BlockLayout.of_one(tensor.numel())
            return layout, self._codec.message_bytes(layout, tensor.dtype)

        return self._layouts.get((tensor.numel(), tensor.dtype), new)

    def _message(self, tensor: torch.Tensor) -> tuple[BlockLayout, torch.Tensor]:
        layout, nbytes = self._layout(tensor)
        return layout, self._buffers.take(nbytes, torch.uint8, tensor.device)

    def _residual(self, like: torch.Tensor, chunk: int) -> torch.Tensor:
        def new() -> torch.Tensor:
            return torch.zeros(like.numel(), dtype=like.dtype, device=like.device)

        return self._residuals[chunk].get((like.numel(), like.dtype), new)


class LowRankMessages(DenseMessages):
    """Messages of gradients as P and Q. Residuals and warm starts outlive an iteration.

    Args:
        states: holds residuals and warm starts; a receiving end has none.
        scratch: memory for values that are needed until `after_post`, or within `after_wait`.
    """

    def __init__(
        self, plan: LinkPlan, compressor: LowRank, *,
        states: FactorStates, scratch: Scratch, gauge: Gauge, statistics: ErrorStatistics,
    ) -> None:  # fmt: skip
        super().__init__(statistics)
        self._plan, self._compressor, self._scratch, self._gauge = plan, compressor, scratch, gauge
        self.states, self._has_residuals = states, plan.config.lazy_error_propagation

    def preallocate(self, like: torch.Tensor, chunk: int) -> None:
        """Make residual and warm start for gradients like `like`, of one model chunk."""
        self._state(like, chunk)

    @torch.no_grad()
    def send(self, tensor: torch.Tensor, chunk: int = 0, number: int = 0) -> Transfer:
        """Make the transfer of [P | Q']. Only the message is computed before posting; residual and warm start follow
        after it.
        """
        state, layout = self._state(tensor, chunk), self._plan.factors(tensor.shape, tensor.dtype)
        factors, p_wire, q_wire = self._factors(layout, tensor.device)
        matrix = state.residual.workspace(self._scratch)
        carried = state.residual.value if self._has_residuals else None
        p = self._scratch.take("p", p_wire.shape, torch.float32, tensor.device)
        q = self._scratch.take("q", q_wire.shape, torch.float32, tensor.device)
        with self._gauge.timed(tensor.device):
            rows = tensor.reshape(matrix.shape)
            self._compressor.project_sum(rows, carried, state.warm_start.value, total=matrix, out=p)
            self._compressor.orthogonalize(p, out=p)
            torch.mul(p, layout.scale, out=p_wire)
            state.note_finite(p_wire, self._scratch)
            self._compressor.back_project(matrix, p_wire, out=q)
            # Q' is computed from P in its wire format, rounded and scaled, so it contains the scale once, and is
            # divided by it twice.
            torch.mul(q, layout.scale**-2, out=q_wire)
            sent = self._buffers.sending(factors)

        def remember() -> None:
            """Compute residual and warm start from P and Q in their wire format."""
            with self._gauge.timed(matrix.device):
                if self._has_residuals or self._gauge.on:
                    self._gauge.note_compressed(matrix)
                    # This reconstruction equals the receiver's, to the bit.
                    self._compressor.subtract_reconstruction(matrix, p_wire, q_wire)
                    self._gauge.note_error(matrix)
                    self._statistics.error(number, matrix)
                if self._has_residuals:
                    state.residual.write(matrix)
                state.write_warm_start(q, self._compressor, self._scratch)

        return replace(sent, after_post=remember)

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """Make the transfer that reconstructs `tensor` from P and Q."""
        layout = self._plan.factors(tensor.shape, tensor.dtype)
        factors, p_wire, q_wire = self._factors(layout, tensor.device)

        def arrived() -> None:
            with self._gauge.timed(tensor.device):
                self._compressor.reconstruct(p_wire, q_wire, out=tensor.view(1, layout.n, layout.m))
            self._buffers.give_back(factors)

        return Transfer(factors, after_wait=arrived)

    def _factors(self, layout: PackedFactors, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return memory for the message [P | Q], and P (1, n, r) and Q (1, m, r) in it."""
        factors = self._buffers.take(layout.numel, layout.dtype, device)
        p, q = layout.split(factors)
        return factors, p.unsqueeze(0), q.unsqueeze(0)

    def _state(self, like: torch.Tensor, chunk: int) -> FactorState:
        def new_state() -> FactorState:
            plan, (rows, columns) = self._plan, _matrix_shape(like.shape)
            # The seed contains neither the tensor-parallel nor the data-parallel rank: without sequence parallelism all
            # tensor-parallel ranks of a stage send the same gradient, and must keep sending the same approximation.
            generator = private_generator(
                plan.config.compression_seed, "compressed-backprop", plan.sending_stage, chunk, rows, columns,
                device=like.device,
            )  # fmt: skip
            return FactorState(
                (1, rows, columns), plan.config.compressed_backprop_rank, generator=generator,
                dtype=state_dtype(plan.config.compression_state_dtype), device=like.device,
            )  # fmt: skip

        # Chunks are different parts of the model, and the residual of one has no relation to another's gradient.
        sizes, dtype = "x".join(map(str, like.shape)), str(like.dtype).removeprefix("torch.")
        return self.states.get(f"chunk {chunk}: {sizes} {dtype}", new_state, kin=f"chunk {chunk}: ", most=_MOST_SHAPES)
