"""One tensor of a point-to-point call, what a technique does around it, and the memory for what is in flight."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

__all__ = ["MessageBuffers", "Transfer"]


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Transfer:
    """What takes a tensor's place in a send or a receive."""

    tensor: torch.Tensor
    """What is posted: the tensor itself, or a compressed message in its place."""

    after_post: Callable[[], None] = _nothing
    """To be called once all of the call's tensors are posted, before any is waited for: work that the wire hides."""

    after_wait: Callable[[], None] = _nothing
    """To be called once the transfer has finished: decompresses what arrived, gives buffers back."""

    def then(self, after_wait: Callable[[], None]) -> "Transfer":
        """The same, and then `after_wait`."""

        def both() -> None:
            self.after_wait()
            after_wait()

        return replace(self, after_wait=both)


class MessageBuffers:
    """Flat buffers for messages; one is made only while more of its size are in flight than ever before."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer that nobody else has; its content is what the last message left."""
        free = self._free.setdefault((numel, dtype), [])
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Of a message that has arrived or left."""
        self._free[buffer.numel(), buffer.dtype].append(buffer)
