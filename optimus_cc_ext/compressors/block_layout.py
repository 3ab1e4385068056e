"""Which values of a flat tensor make up the blocks of which message."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["BLOCK", "BlockLayout", "Piece", "blocks_in"]

BLOCK = 128
"""Values that share a scale."""

_ALIGNMENT = 16
"""Of the sections of a message, in bytes: what a GPU loads at once."""


def blocks_in(numel: int) -> int:
    """Blocks that so many values next to each other take; the last one may be a short one."""
    return -(-numel // BLOCK)


@dataclass(frozen=True, slots=True)
class Piece:
    """Values that lie next to each other, and the blocks of a message that they become."""

    start: int
    """Where they begin in the flat tensor."""

    numel: int
    block: int
    """The first of their blocks. All are full but the last one, which `numel` may leave short."""


class BlockLayout:
    """N equally long messages, of which each takes its blocks, and values that are sent as they are, from its ranges.

    A message is [dense values | scales, bf16 | codes], each section as long as the longest of all messages needs it,
    so that all are equally long and every replica knows every length. No block crosses the end of a range. A short
    block is filled up with zeros: it costs the bytes of a full one.

    Args:
        coded: by message: (start, length) of what is encoded, in elements of the flat tensor.
        dense: the same of what is sent as it is.
    """

    def __init__(
        self, coded: Sequence[Sequence[tuple[int, int]]], dense: Sequence[Sequence[tuple[int, int]]] | None = None
    ) -> None:
        self.pieces = tuple(tuple(_pieces(ranges)) for ranges in coded)
        """By message."""

        self.dense = tuple(tuple(_joined(ranges)) for ranges in dense or [()] * len(coded))
        """By message: ranges that lie next to each other are one."""

        self.blocks = max((last.block + blocks_in(last.numel) for *_, last in filter(None, self.pieces)), default=0)
        """In each message; a message that has fewer has unused ones at its end."""

        self.dense_numel = max((sum(length for _, length in ranges) for ranges in self.dense), default=0)
        """In each message; unused ones at its end."""

    @classmethod
    def of_one(cls, numel: int) -> "BlockLayout":
        """One message of one flat tensor, all of it encoded."""
        return cls([[(0, numel)]])

    def of_message(self, index: int, start: int = 0) -> "BlockLayout":
        """Make the layout of one of these messages, as long as they all are; offsets are relative to `start`."""
        layout = BlockLayout(())
        layout.pieces = (tuple(Piece(p.start - start, p.numel, p.block) for p in self.pieces[index]),)
        layout.dense = (tuple((at - start, length) for at, length in self.dense[index]),)
        layout.blocks, layout.dense_numel = self.blocks, self.dense_numel
        return layout

    @property
    def messages(self) -> int:
        """N."""
        return len(self.pieces)

    def sections(self, code_bytes: int, itemsize: int) -> tuple[int, int, int]:
        """Where scales and codes begin, and where the message ends, in bytes.

        Args:
            code_bytes: of one block.
            itemsize: bytes of a dense value.
        """
        scales = _aligned(self.dense_numel * itemsize)
        codes = scales + _aligned(self.blocks * 2)
        return scales, codes, codes + _aligned(self.blocks * code_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pieces(ranges: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """Ranges of whole blocks that lie next to each other become one piece."""
    block, pending = 0, None
    for start, length in sorted(ranges):
        if pending is not None and pending.start + pending.numel == start and pending.numel % BLOCK == 0:
            pending = Piece(pending.start, pending.numel + length, pending.block)
        else:
            if pending is not None:
                yield pending
            pending = Piece(start, length, block)
        block = pending.block + blocks_in(pending.numel)
    if pending is not None:
        yield pending


def _joined(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    pending = None
    for start, length in sorted(ranges):
        if pending is not None and sum(pending) == start:
            pending = (pending[0], pending[1] + length)
        else:
            if pending is not None:
                yield pending
            pending = (start, length)
    if pending is not None:
        yield pending
