"""Division of a flat tensor among the ranks that add it up, and of their messages into slices that fit into a slot of
the ring of message buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from optimus_cc_ext.collectives.messages import Formats, message_bytes
from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.collectives.ranges import Range, cut, dealt, portions, within
from optimus_cc_ext.compressors.blocks import AT_ONCE, BlockLayout, joined
from optimus_cc_ext.compressors.formats import BLOCK, format_named, section_bytes
from optimus_cc_ext.slots import GRAIN, check_slot, slices


@dataclass(frozen=True, eq=False, kw_only=True)
class Division:
    """Division of a flat tensor: which rank adds up which part, and in which slices.

    With the distributed optimizer a rank adds up the shard that its optimizer reads. Otherwise blocks, and dense
    values, are dealt out evenly. No block crosses the end of a parameter: parameters that tensor-parallel ranks
    replicate lie between others that they do not replicate, and a block of both would have another scale on each rank.

    Args:
        numel: elements of the flat tensor.
        coded, dense: the ranges that are encoded, and those that are sent uncompressed, in any order.
        dtype: dtype of the flat tensor.
        ranks: number of ranks among which the tensor is summed.
        sharded: True if a rank needs only its own part of the sum.
        levels: the levels of the sum.
        place: the place of this rank in its node.
        slot_bytes: the most bytes of messages under way at once, in both directions; None: no limit.
        like: a division whose layouts, with the tables of the kernels, this one shares if they are the same.
    """

    numel: int
    coded: Sequence[Range]
    dense: Sequence[Range] = ()
    dtype: torch.dtype
    ranks: int
    sharded: bool
    formats: Formats
    levels: Levels = ONE_LEVEL
    place: int = 0
    slot_bytes: int | None = None
    like: "Division | None" = None

    @property
    def members(self) -> int:
        """L: the ranks of each node, which add up dense; 1 in one level."""
        return self.levels.members if self.levels.two else 1

    @property
    def senders(self) -> int:
        """N: the ranks that exchange messages."""
        return self.ranks // self.members

    @property
    def scatters(self) -> bool:
        """True if every part of the sum is needed by the rank alone that adds it up."""
        return self.sharded and not self.levels.instances

    # -- ranges ---------------------------------------------------------------------------------------------------

    @cached_property
    def slabs(self) -> list[Range]:
        """Ranges that the ranks of a node add up; each range is cut evenly among the ranks."""
        members, nodes = self.members, self.senders
        if members == 1:
            return []
        if self.levels.instances:
            return [(0, self.numel)]
        if self.sharded:
            return [(node * self.numel // nodes, self.numel // nodes) for node in range(nodes)]
        sizes = ((start, length // (members * BLOCK) * BLOCK) for start, length in self._runs)
        return [(start, members * size) for start, size in sizes if size]

    @cached_property
    def remainders(self) -> list[Range]:
        """Ranges of values that are left over when a run is cut into blocks; all ranks sum them dense, in one level."""
        if self.sharded or self.members == 1:
            return []
        unit = self.members * BLOCK
        return [(start + length - length % unit, length % unit) for start, length in self._runs if length % unit]

    @property
    def _runs(self) -> list[Range]:
        return joined([*self.coded, *self.dense])

    @cached_property
    def parts(self) -> list[Range]:
        """Part of each slab whose sum over the node this rank holds."""
        lengths = ((start, length // self.members) for start, length in self.slabs)
        return [(start + self.place * length, length) for start, length in lengths]

    @cached_property
    def shards(self) -> tuple[list[list[Range]], list[list[Range]]]:
        """Encoded ranges that each rank of the rail adds up, and its dense ranges, by rank."""
        if self.scatters:
            size, own = self.numel // self.ranks, slice(self.place % self.members, None, self.members)
            return cut(self.coded, self.ranks, size)[own], cut(self.dense, self.ranks, size)[own]
        coded, dense = self.coded, self.dense
        if self.members > 1:
            coded, dense = within(coded, self.parts), within(dense, self.parts)
        return dealt(coded, self.senders, BLOCK), dealt(dense, self.senders, 1)

    @cached_property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """Layouts of one message per rank, for each slice. They take O(D + P) steps to make, for D ranks and P
        parameters.

        A slice has a portion of every shard. Shards are dealt before they are cut, and cut where the encoder computes
        the same bits as for one message (`_unit`).
        """
        if self.like is not None and self.like.shards == self.shards and self.like._cut == self._cut:
            return self.like.layouts
        count, unit = self._cut
        if count == 1:
            return (BlockLayout(*self.shards),)
        coded = [portions(joined(shard, BLOCK), count, BLOCK, partial(_unit, unit)) for shard in self.shards[0]]
        dense = [portions(joined(shard), count) for shard in self.shards[1]]
        return tuple(map(BlockLayout, zip(*coded, strict=True), zip(*dense, strict=True)))

    @cached_property
    def _cut(self) -> tuple[int, int]:
        """Number of slices, and the largest distance between two possible cuts of a shard, in blocks.

        Raises:
            FlagError: not even one block of each rank fits into a slot.
        """
        blocks, values = (
            max((sum(-(-length // size) for _, length in shard) for shard in shards), default=0)
            for shards, size in zip(self.shards, (BLOCK, 1), strict=True)
        )
        if self.slot_bytes is None or self._slot(blocks, values) <= self.slot_bytes:
            return 1, 1
        check_slot(self._slot(1, 1), self.slot_bytes, f"one block to each of {self.senders} ranks")
        return slices(self._slot, blocks, values, self.slot_bytes, AT_ONCE)

    def _slot(self, blocks: int, values: int) -> int:
        """Return the bytes of messages of so many blocks and dense values: of gradients in both directions, and later
        of sums.
        """
        gradients, sums = (
            section_bytes(blocks, values, format_named(format).code_bytes, self.dtype.itemsize)[2]
            for format in self.formats
        )
        return self.senders * max(2 * gradients, sums)

    @property
    def slice_bytes(self) -> list[int]:
        """Bytes of memory for the messages of each slice, between this rank and all others."""
        return [self._slot(layout.blocks, layout.dense_numel) for layout in self.layouts]

    @property
    def gather_bytes(self) -> list[int]:
        """For each slice, the bytes of memory in which a gather in the format of gradients receives all messages."""
        format = self.formats.gradients
        return [self.senders * message_bytes(layout, format, self.dtype) for layout in self.layouts]

    def own_layouts(self, rank: int, starts: tuple[int, ...] | None = None) -> list[BlockLayout]:
        """Return the layouts of one rank's messages, by slice, padded to the common message lengths. They are made
        once, and with them the tables of the kernels, for which the host waits.

        Args:
            starts: for each slice, the place in the flat tensor to which offsets are relative; None: its start.
        """
        key = rank, starts or (0,) * len(self.layouts)
        if key not in self._own_layouts:
            self._own_layouts[key] = [
                layout.of_message(rank, start) for layout, start in zip(self.layouts, key[1], strict=True)
            ]
        return self._own_layouts[key]

    @cached_property
    def _own_layouts(self) -> dict[tuple[int, tuple[int, ...]], list[BlockLayout]]:
        return {}

    @property
    def matrices(self) -> int:
        """Number of encoded ranges."""
        return len(self.coded)


def _unit(most: int, blocks: int) -> int:
    """Return the number of blocks at whose multiples a range of `blocks` is cut, at most `most`.

    The encoder takes up to `AT_ONCE` blocks at once. torch's matrix product rounds fewer than 4 rows in another way, so
    no cut may leave the last 1 to 3 blocks of a range alone, or join them to others: `AT_ONCE` is a multiple of the
    unit, and a range whose last 1 to 3 blocks are alone is cut at multiples of `AT_ONCE`.
    """
    unit = min(most, GRAIN)
    while unit < most and 0 < blocks % unit < 4:
        unit *= 2
    return unit
