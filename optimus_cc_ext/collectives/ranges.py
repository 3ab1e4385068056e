"""Ranges of a flat tensor, and their division among ranks."""

from collections.abc import Callable, Sequence

import torch

Range = tuple[int, int]
"""Range of a flat tensor, as (start, length) in elements."""


def cut(ranges: Sequence[Range], parts: int, size: int) -> list[list[Range]]:
    """Cut ranges at every multiple of `size`; return the pieces of each of the `parts` intervals between multiples."""
    pieces: list[list[Range]] = [[] for _ in range(parts)]
    for start, length in ranges:
        end = start + length
        while start < end:
            part = start // size
            stop = min(end, (part + 1) * size)
            pieces[part].append((start, stop - start))
            start = stop
    return pieces


def dealt(ranges: Sequence[Range], parts: int, unit: int) -> list[list[Range]]:
    """Deal ranges out to parts in whole units, counted from each range's start. All parts but the last get equally many
    units.
    """
    share = -(-sum(-(-length // unit) for _, length in ranges) // parts)
    taken_by: list[list[Range]] = [[] for _ in range(parts)]
    units = 0
    for start, length in sorted(ranges):
        done = 0
        while done < length:
            part, used = divmod(units, share)
            taken = min(length - done, (share - used) * unit)
            taken_by[part].append((start + done, taken))
            done += taken
            units += -(-taken // unit)
    return taken_by


def portions(
    ranges: Sequence[Range], count: int, block: int = 1, unit: Callable[[int], int] = lambda blocks: 1
) -> list[list[Range]]:
    """Cut ranges into consecutive portions that have about equally many blocks each.

    Args:
        ranges: in ascending order; each begins with a whole block, and its last block may be short.
        count: number of portions.
        block: elements of a block.
        unit: returns, for a range of so many blocks, the number of blocks from its start at whose multiples it may be
            cut. A portion has up to that number less one more blocks than its share.
    """
    total = sum(-(-length // block) for _, length in ranges)
    found: list[list[Range]] = [[] for _ in range(count)]
    passed = index = 0
    for start, length in ranges:
        blocks, at = -(-length // block), 0
        while at < blocks:
            until = total * (index + 1) // count - passed
            end = blocks if until >= blocks else until // unit(blocks) * unit(blocks)
            if end > at:
                found[index].append((start + at * block, min(end * block, length) - at * block))
                at = end
            if at < blocks:
                index += 1
        passed += blocks
    return found


def within(ranges: Sequence[Range], parts: Sequence[Range]) -> list[Range]:
    """Return the parts of `ranges` that lie in `parts`; both lists are short, and in any order."""
    cuts = (
        (max(start, first), min(start + length, first + size))
        for start, length in ranges
        for first, size in parts
    )  # fmt: skip
    return [(start, end - start) for start, end in cuts if start < end]


def views(flat: torch.Tensor, ranges: Sequence[Range]) -> list[torch.Tensor]:
    """Return the ranges of a flat tensor as views."""
    return [flat[start : start + length] for start, length in ranges]
