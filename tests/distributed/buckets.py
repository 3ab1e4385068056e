"""Gradient buckets and their reducers, as Megatron's data-parallel groups have them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.bucket_reducer import BucketReducer

__all__ = ["Bucket", "Shapes", "of_layers", "reduce"]

Shapes = Sequence[tuple[int, ...]]


def of_layers(layers: int, hidden: int = 8) -> Shapes:
    """Transformer layers, matrices between norms and biases; before them a matrix that is shaped like one of theirs."""
    h = hidden
    layer = [(h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,), (h,), (3 * h,), (3 * h, h), (h,), (h, h), (h,), (h,)]
    return [(h, h), (3,), *layer * layers]


class Bucket:
    """Tensors of `shapes` one after the other in one buffer, filled up to be cut into `parts`."""

    def __init__(self, shapes: Shapes, parts: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self.flat = torch.zeros(sum(sizes) + -sum(sizes) % parts, dtype=dtype, device=device)
        pieces = self.flat[: sum(sizes)].split(sizes)
        self.views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        self.matrices = [view for view in self.views if view.dim() == 2]

    def reducer(
        self, compressor: LowRank, compression_rank: int, shard: torch.Tensor | None = None, *,
        norm_groups: list[str] | None = None, wire: Codec | None = None, **config: Any,
    ) -> BucketReducer:  # fmt: skip
        return BucketReducer(
            self.matrices,
            [view for view in self.views if view.dim() == 1],
            shard=shard,
            group=dist.group.WORLD,
            compressor=compressor,
            config=DataParallelCompressionConfig(dp_compression=True, dp_compression_rank=compression_rank, **config),
            seed=1,
            salt="test",
            wire=wire,
            **({"norm_groups": norm_groups} if norm_groups else {}),
        )


def reduce(reducer: BucketReducer, **how: bool) -> None:
    """A step that counts."""
    reducer.reduce(**how)
    reducer.states.commit({})
