"""Tensors between pipeline stages as blocks in few bits, both directions."""

from dataclasses import replace
from functools import partial

import torch

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.transfer import MessageBuffers, Transfer

__all__ = ["BlockMessages"]


class BlockMessages:
    """One end of one direction: what is posted in place of a tensor, and the buffers for messages in flight.

    A tensor of any shape is encoded as one flat run of blocks, which lie along the hidden dimension where that is a
    multiple of 128. Both ends know a message's length from the tensor's shape and dtype.
    """

    def __init__(self, codec: Codec, gauge: Gauge | None = None) -> None:
        self._codec, self._gauge = codec, gauge or Gauge()
        self._layouts: dict[int, BlockLayout] = {}
        self._buffers = MessageBuffers()

    def nbytes(self, tensor: torch.Tensor) -> int:
        """Bytes of the message of a tensor of this shape and dtype."""
        return self._codec.message_bytes(self._layout(tensor), tensor.dtype)

    @torch.no_grad()
    def send(self, tensor: torch.Tensor, residual: torch.Tensor | None = None) -> Transfer:
        """What travels instead of `tensor`, which is not changed, and not needed after this.

        Args:
            residual: flat, as long as the tensor and of its dtype: what messages before this one left out. It is added
                to the tensor, and what this message leaves out takes its place. None: nothing is remembered.
        """
        layout, values = self._layout(tensor), tensor.detach().reshape(-1)
        message = self._buffer(tensor)
        with self._gauge.timed(tensor.device):
            if residual is not None:
                values = residual.add_(values)
            self._codec.encode(values, layout, message)
        if self._gauge.on:
            self._codec.errors(values, layout, message, self._gauge.note)
        transfer = Transfer(
            message, after_wait=partial(self._buffers.give_back, message), park=partial(self._buffers.park, message)
        )
        if residual is None:
            return transfer
        return replace(transfer, after_post=partial(self._remember, message, layout, residual))

    def settle(self) -> None:
        """Wait for the messages that are still being sent."""
        self._buffers.settle()

    @torch.no_grad()
    def _remember(self, message: torch.Tensor, layout: BlockLayout, residual: torch.Tensor) -> None:
        arrives = self._buffers.take(residual.numel(), residual.dtype, residual.device)
        with self._gauge.timed(residual.device):
            self._codec.decode(message, layout, arrives)
            residual.sub_(arrives)
        self._buffers.give_back(arrives)

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """What is received into instead of `tensor`, contiguous, which is written once that has arrived."""
        message = self._buffer(tensor)
        return Transfer(message, after_wait=partial(self._decode, message, tensor))

    @torch.no_grad()
    def read(self, message: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write what a message says into a contiguous tensor."""
        self._codec.decode(message, self._layout(tensor), tensor.detach().view(-1))

    def _decode(self, message: torch.Tensor, tensor: torch.Tensor) -> None:
        with self._gauge.timed(tensor.device):
            self.read(message, tensor)
        self._buffers.give_back(message)

    def _layout(self, tensor: torch.Tensor) -> BlockLayout:
        numel = tensor.numel()
        if numel not in self._layouts:
            self._layouts[numel] = BlockLayout.of_one(numel)
        return self._layouts[numel]

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._buffers.take(self.nbytes(tensor), torch.uint8, tensor.device)
