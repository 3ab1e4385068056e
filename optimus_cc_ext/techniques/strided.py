"""Many equal tensors of one buffer as few strided views: so the number of kernels does not grow with the layers.

Megatron lays a bucket's parameters out one after the other, so that what belongs to one layer lies at a constant
distance from what belongs to the next: `as_strided` makes one batch of it, and one kernel reads or writes it all.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import torch

__all__ = ["Progression", "Shared", "progressions"]

PERIOD = 16
"""Tensors of one shape that a layer may have before its progressions are cut into shorter ones."""


@dataclass(frozen=True, slots=True)
class Progression:
    """Equal tensors at equal distances in one flat buffer, counted in elements."""

    first: int
    """The place where the first of them begins."""

    stride: int
    """From the beginning of one to the beginning of the next."""

    count: int

    def batch(self, flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return (count, *shape), a view into `flat`, each tensor contiguous in itself."""
        inner = torch.empty(shape, device="meta").stride()
        at = int(flat.storage_offset()) + self.first
        return flat.as_strided((self.count, *shape), (self.stride, *inner), at)

    def shared_with(self, start: int, stop: int, numel: int) -> list["Shared"]:
        """Find the parts of these tensors, of `numel` elements each, that lie between `start` and `stop` in the buffer.

        At most three answers: the whole tensors, and the ones that are cut at either end.
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
    """The elements from `low` to `high` of each of `count` tensors of a progression, from `index` on."""

    index: int
    count: int
    low: int
    high: int


def progressions(offsets: Iterable[int]) -> list[Progression]:
    """Cover distinct `offsets`, in elements, by few arithmetic progressions, each as long as it gets.

    Tensors of one shape that a layer has k of, k <= `PERIOD`, make k progressions, however many layers there are;
    what stands alone at either end of the bucket makes one of its own.

    Raises:
        ValueError: two of them are the same.
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
