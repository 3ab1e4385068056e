"""Memory for intermediate results, allocated once: the law "no allocation per message after the first iteration"."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Scratch"]


class Scratch:
    """Tensors by name, whose contents last until the name is taken again.

    One name serves every shape: behind it lies one buffer per dtype and device, as large as the largest request so
    far. So the memory is that of the largest user, not of all users together. Users must be ordered on one stream.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor; it shares its memory with every other one of this name and dtype."""
        key = (name, dtype, device)
        numel = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel].view(tuple(shape))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
