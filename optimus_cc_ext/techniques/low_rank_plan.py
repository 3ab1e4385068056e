"""Plan of a low-rank reduction: the matrices that are factored together, and the contents of each collective.

Equally shaped matrices are one batch, so a bucket costs the same number of kernels at any number of layers. The shapes
are cut into a few packs (one if the model is small): while the P of a pack are summed, the next pack is projected;
while its Q are summed, the next P is orthogonalised, and so on.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from optimus_cc_ext.compressors.blocks import joined
from optimus_cc_ext.compressors.low_rank import effective_rank
from optimus_cc_ext.metrics.traffic import all_reduce_bytes, leaving_ring
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.exchange import ParameterRecord, Range
from optimus_cc_ext.techniques.state import state_bytes
from optimus_cc_ext.techniques.strided import progressions

__all__ = ["EqualMatrices", "LowRankPlan", "PackPlan"]

PACKED_UP_TO_BYTES = 1 << 20
"""Largest size of dense runs of a bucket that are sent with P in one collective; longer runs are reduced in place."""

PACK_AT_LEAST_BYTES = 256 << 10
"""Bytes that a collective has to carry to be worth its latency. P and Q of a small model each fit in one collective."""

MOST_PACKS = 4
"""Largest number of packs, so of collectives per phase: with several, the next matrices are projected during a sum."""


@dataclass(frozen=True)
class EqualMatrices:
    """Matrices of one shape and one gradient-norm group, because clipping scales the residuals of a group together."""

    rows: int
    columns: int
    norm_group: str
    starts: tuple[int, ...]
    """Offsets of the matrices in the flat bucket, in the order of the bucket."""

    r: int
    """Number r of columns of the matrices' factors."""

    @property
    def name(self) -> str:
        """Name of the matrices' state in checkpoints."""
        apart = "" if self.norm_group == MAIN_NORM_GROUP else f" {self.norm_group}"
        return f"{self.rows}x{self.columns}{apart}"

    @property
    def p_numel(self) -> int:
        """Number of values of P, of all matrices."""
        return len(self.starts) * self.rows * self.r

    @property
    def q_numel(self) -> int:
        """Number of values of Q, of all matrices."""
        return len(self.starts) * self.columns * self.r


@dataclass(frozen=True)
class PackPlan:
    """Pack of matrices of some shapes: one collective sums all their P, and another one all their Q."""

    shapes: list[EqualMatrices]
    dense: list[Range]
    """Dense runs that are sent after the P, in the same message."""

    @property
    def first(self) -> list[int]:
        """Numbers of values in the first message: the P of each shape, then the dense runs."""
        return [*(same.p_numel for same in self.shapes), *(length for _, length in self.dense)]

    @property
    def second(self) -> list[int]:
        """Numbers of values in the second message: the Q of each shape."""
        return [same.q_numel for same in self.shapes]


@dataclass(frozen=True, eq=False, kw_only=True)
class LowRankPlan:
    """Plan of one bucket's reduction as P and Q.

    Args:
        numel: elements of the bucket.
        low_rank: the parameters that are factored, with two dimensions or more; at least one.
        dense: the ranges that are summed uncompressed.
        dtype: dtype of the bucket.
        rank: `--dp-compression-rank`.
        sharded: True if a rank needs only its shard of the bucket.
    """

    numel: int
    low_rank: Sequence[ParameterRecord]
    dense: Sequence[Range]
    dtype: torch.dtype
    ranks: int
    rank: int
    sharded: bool = False

    @property
    def matrices(self) -> int:
        """Number of the bucket's gradients that are compressed."""
        return len(self.low_rank)

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of P and Q in messages: that of the bucket, if it is bf16 or fp32."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    @cached_property
    def shapes(self) -> list[EqualMatrices]:
        """The bucket's compressed matrices, grouped by shape."""
        alike: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        for matrix in self.low_rank:
            alike[matrix.rows, matrix.columns, matrix.norm_group].append(matrix.start)
        return [
            EqualMatrices(rows, columns, norm_group, tuple(starts), effective_rank(rows, columns, self.rank))
            for (rows, columns, norm_group), starts in alike.items()
        ]

    @cached_property
    def runs(self) -> list[Range]:
        """Dense ranges that are reduced in place by one collective each; adjacent ranges are joined."""
        return [run for run in joined(self.dense) if run[1] * self.dtype.itemsize > PACKED_UP_TO_BYTES]

    @cached_property
    def packs(self) -> list[PackPlan]:
        """Collectives of both phases; the first pack carries the small dense runs, too."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for start, length in joined(self.dense):
            if length * self.dtype.itemsize <= PACKED_UP_TO_BYTES:
                by_length[length].append(start)
        first, *others = _packs(self.shapes, self.wire_dtype.itemsize)
        # The order decides how a ring adds up: equal runs of all layers lie together.
        dense = [
            (start, length)
            for length, starts in by_length.items()
            for there in progressions(starts)
            for start in range(there.first, there.first + there.count * there.stride, there.stride)
        ]
        return [PackPlan(first, dense), *(PackPlan(shapes, []) for shapes in others)]

    @property
    def wire_bytes(self) -> int:
        """Bytes of memory for messages: all P and Q, and the small dense runs."""
        return sum(sum(pack.first) + sum(pack.second) for pack in self.packs) * self.wire_dtype.itemsize

    def sent_bytes(self, whole: bool = False) -> int:
        """Bytes that one rank sends: the same number for a shard and for the whole bucket."""
        dense = sum(length for _, length in self.runs) * self.dtype.itemsize
        return all_reduce_bytes(self.wire_bytes + dense, self.ranks)

    def leaving_bytes(self, beside: int, whole: bool = False) -> float:
        """Return the bytes of one rank that leave its node, which holds `beside` ranks of the group."""
        return leaving_ring(self.sent_bytes(), self.ranks, beside)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of memory for residuals, warm starts and fallback directions, which are kept in `dtype`."""
        return sum(len(s.starts) * state_bytes(s.rows, s.columns, self.rank, dtype) for s in self.shapes)


def _packs(shapes: Sequence[EqualMatrices], itemsize: int) -> list[list[EqualMatrices]]:
    """Cut shapes into packs of neighbours whose two messages are large enough on average; at most `MOST_PACKS` packs.

    Args:
        itemsize: bytes of a value in messages.
    """
    sizes = [(same.p_numel + same.q_numel) * itemsize for same in shapes]
    least = max(2 * PACK_AT_LEAST_BYTES, -(-sum(sizes) // MOST_PACKS))
    packs: list[list[EqualMatrices]] = []
    room = 0
    for index, (same, size) in enumerate(zip(shapes, sizes, strict=True)):
        # A new pack begins only if the remaining shapes are enough to fill it.
        if not packs or (room >= least and sum(sizes[index:]) >= least):
            packs.append([])
            room = 0
        packs[-1].append(same)
        room += size
    return packs
