"""Scratch memory for intermediate results, allocated once, so that after the first iteration no message allocates
memory.
"""

import math

import torch
from torch import Tensor


class Scratch:
    """Scratch tensors by name. A tensor's contents are valid until its name is taken again.

    One name serves every shape: it has one buffer per dtype and device, as large as the largest request so far. So the
    memory is that of the largest user, not of all users together. Users must be ordered on one stream.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        # Tensors are cached by the arguments of `take`: making a view of a buffer costs as much as a small product.
        self._taken: dict[tuple[str, tuple[int, ...], torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor, which shares its memory with all tensors of this name, dtype and
        device.
        """
        taken = self._taken.get((name, shape, dtype, device))
        return taken if taken is not None else self._make(name, shape, dtype, device)

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        key, numel = (name, dtype, device), math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
            # Cached views of the smaller buffer are dropped, because they would keep its memory allocated.
            self._taken = {request: part for request, part in self._taken.items() if (request[0], *request[2:]) != key}
        part = self._taken[name, shape, dtype, device] = buffer[:numel].view(shape)
        return part

    def clear(self) -> None:
        """Drop all memory; tensors that are still used keep theirs."""
        self._buffers.clear()
        self._taken.clear()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
