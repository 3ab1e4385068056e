"""Gradient buckets and their reducers, as Megatron's data-parallel groups have them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.exchange import BlockCodecs, ExchangePlan, Groups, ParameterRecord, Range
from optimus_cc_ext.techniques.low_rank_plan import LowRankPlan
from optimus_cc_ext.techniques.low_rank_reducer import LowRankReducer
from optimus_cc_ext.techniques.reducers import BlockReducer

__all__ = ["Bucket", "Shapes", "of_layers", "reduce"]

Shapes = Sequence[tuple[int, ...]]


def of_layers(layers: int, hidden: int = 8) -> Shapes:
    """Return the shapes of transformer layers, with matrices between norms and biases; before them, one more matrix
    like theirs.
    """
    h = hidden
    layer = [(h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,), (h,), (3 * h,), (3 * h, h), (h,), (h, h), (h,), (h,)]
    return [(h, h), (3,), *layer * layers]


class Bucket:
    """Tensors of `shapes` one after the other in one buffer, padded so that it can be cut into `parts`."""

    def __init__(self, shapes: Shapes, parts: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self.flat = torch.zeros(sum(sizes) + -sum(sizes) % parts, dtype=dtype, device=device)
        pieces = self.flat[: sum(sizes)].split(sizes)
        self.views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        self.matrices = [view for view in self.views if view.dim() == 2]

    def reducer(
        self, compressor: LowRank, compression_rank: int, shard: torch.Tensor | None = None, *,
        norm_groups: list[str] | None = None, **config: Any,
    ) -> LowRankReducer:  # fmt: skip
        groups_of = dict(zip((matrix.storage_offset() for matrix in self.matrices), norm_groups or (), strict=False))
        plan = LowRankPlan(
            numel=self.flat.numel(),
            low_rank=[
                ParameterRecord(
                    shape=tuple(matrix.shape), start=start, norm_group=groups_of.get(start, MAIN_NORM_GROUP)
                )
                for matrix in self.matrices
                for start in (int(matrix.storage_offset()),)
            ],
            dense=self.ranges[1], dtype=self.flat.dtype, ranks=dist.get_world_size(), rank=compression_rank,
        )  # fmt: skip
        return LowRankReducer(
            plan,
            self.flat.device,
            Groups(dist.group.WORLD),
            shard=None if shard is None else (int(shard.storage_offset()), shard.numel()),
            compressor=compressor,
            config=DataParallelCompressionConfig(dp_compression=True, dp_compression_rank=compression_rank, **config),
            seed=1,
            salt="test",
        )

    @property
    def ranges(self) -> tuple[list[Range], list[Range]]:
        """Return the ranges of tensors with two dimensions or more, and those of vectors."""
        matrices, vectors = (
            [(int(view.storage_offset()), view.numel()) for view in self.views if (view.dim() > 1) is more]
            for more in (True, False)
        )
        return matrices, vectors

    def exchange(self, codecs: BlockCodecs, ranks: int, sharded: bool) -> ExchangePlan:
        """Return the plan of an exchange of this bucket, in which all tensors but vectors are encoded."""
        coded, dense = self.ranges
        return ExchangePlan(
            numel=self.flat.numel(), coded=coded, dense=dense, dtype=self.flat.dtype, ranks=ranks, sharded=sharded,
            formats=codecs.formats,
        )  # fmt: skip

    def block_reducer(self, codecs: BlockCodecs, sharded: bool, **how: Any) -> BlockReducer:
        """Return the reducer of this bucket in blocks of few bits, over all ranks; `exchange` is its plan."""
        plan = self.exchange(codecs, dist.get_world_size(), sharded)
        return BlockReducer(plan, self.flat.device, Groups(dist.group.WORLD), codecs, **how)


def reduce(reducer: LowRankReducer, bucket: Bucket, **how: bool) -> None:
    """Reduce a bucket once, and commit the state as after an applied step."""
    reducer.reduce(bucket.flat, **how)
    reducer.states.commit({})
