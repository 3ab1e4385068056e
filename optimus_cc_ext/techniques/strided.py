"""Equal tensors of one buffer as few strided views, so that the number of kernels does not grow with the layers.

Megatron lays a bucket's parameters out one after the other, so that tensors of one layer lie at a constant distance
from those of the next: `as_strided` makes one batch of them, which one kernel reads or writes.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

PERIOD = 16
"""Largest number of tensors of one shape in a layer for which progressions span all layers."""


@dataclass(frozen=True, slots=True)
class Progression:
    """Progression: equal tensors at equal distances in one flat buffer, counted in elements."""

    first: int
    """Offset of the first tensor."""

    stride: int
    """Distance between the beginnings of two successive tensors."""

    count: int

    def batch(self, flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return (count, *shape), a view into `flat`, in which each tensor is contiguous."""
        sizes, strides = (self.count, *shape), (self.stride, *_inside(shape))
        return flat.as_strided(sizes, strides, int(flat.storage_offset()) + self.first)

    def shared_with(self, start: int, stop: int, numel: int) -> list["Shared"]:
        """Return the parts of these tensors, of `numel` elements each, that lie between `start` and `stop` in the
        buffer.

        There are at most three: the whole tensors, and a tensor that is cut at either end.
        """
        pieces: list[Shared] = []
        for index in range(self.count):
            begins = self.first + index * self.stride
            low, high = max(start - begins, 0), min(stop - begins, numel)
            if low >= high:
                continue
            last = pieces[-1] if pieces else None
            if (low, high) == (0, numel) and last and (last.low, last.high) == (0, numel):
                pieces[-1] = Shared(last.index, last.count + 1, 0, numel)
            else:
                pieces.append(Shared(index, 1, low, high))
        return pieces


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared elements: those from `low` to `high` of each of `count` tensors of a progression, from `index` on."""

    index: int
    count: int
    low: int
    high: int


@cache
def _inside(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[place:]) for place in range(1, len(shape) + 1))


def progressions(offsets: Iterable[int]) -> list[Progression]:
    """Cover distinct `offsets`, in elements, by few arithmetic progressions, each as long as possible.

    If a layer has k tensors of one shape, k <= `PERIOD`, there are k progressions, however many layers there are; a
    tensor without equally spaced neighbours becomes a progression of length 1.

    Raises:
        ValueError: two of the offsets are equal.
    """
    remaining = sorted(offsets)
    if len(set(remaining)) < len(remaining):
        raise ValueError(f"tensors at the same offset {remaining}: they overlap")
    found = []
    while remaining:
        first, present = remaining[0], set(remaining)
        strides = [other - first for other in remaining[1 : 1 + PERIOD]] or [1]
        stride = max(strides, key=lambda stride: _length(first, stride, present))
        found.append(Progression(first, stride, _length(first, stride, present)))
        for index in range(found[-1].count):
            del remaining[bisect_left(remaining, first + index * stride)]
    return found


def _length(first: int, stride: int, present: set[int]) -> int:
    count = 1
    while first + count * stride in present:
        count += 1
    return count
