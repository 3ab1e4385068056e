"""Gradient buckets and their reducers, as Megatron's data-parallel groups have them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.exchange import Exchange, ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.messages import BlockCodecs, Tools
from optimus_cc_ext.collectives.ranges import Range
from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.low_rank_gradients import LowRankPlan, LowRankReducer, LowRankTools
from optimus_cc_ext.techniques.state import FactorStates

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
            numel=self.flat.numel(), sharded=shard is not None,
            low_rank=[
                ParameterRecord(
                    shape=tuple(matrix.shape), start=start, norm_group=groups_of.get(start, MAIN_NORM_GROUP)
                )
                for matrix in self.matrices
                for start in (int(matrix.storage_offset()),)
            ],
            dense=self.ranges[1], dtype=self.flat.dtype, ranks=dist.get_world_size(), rank=compression_rank,
        )  # fmt: skip
        tools = LowRankTools(
            device=self.flat.device, compressor=compressor, states=FactorStates(compression_rank), name="bucket 0",
            config=DataParallelCompressionConfig(
                dp_compression_format="low-rank", dp_compression_rank=compression_rank, **config
            ),
            seed=1, salt="test",
        )  # fmt: skip
        return plan.bind(Groups(dist.group.WORLD), tools)

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

    def block_reducer(self, codecs: BlockCodecs, sharded: bool, **how: Any) -> Exchange:
        """Return the reducer of this bucket in blocks of few bits, over all ranks; `exchange` is its plan."""
        plan, tools = self.exchange(codecs, dist.get_world_size(), sharded), {"device": self.flat.device, **how}
        return plan.bind(Groups(dist.group.WORLD), Tools(codecs=codecs, **tools))


def reduce(reducer: LowRankReducer, bucket: Bucket, **how: bool) -> None:
    """Reduce a bucket once, and commit the state as after an applied step."""
    reducer.reduce(bucket.flat, **how)
    reducer.states.commit({})
