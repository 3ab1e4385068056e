"""One tensor of a point-to-point call, and what a technique does around it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Transfer"]


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
