"""Fused embedding synchronisation (paper section 6).

The tied word embedding lives on the first and on the last pipeline stage. Megatron reduces its gradient over the
data-parallel replicas of each stage, then over the pair of stages. Both sums together are one sum over the union
of those ranks, which moves V (2D - 1) / D bytes per rank instead of V (3D - 2) / D.

With the distributed optimizer each replica reads only its shard of the reduced gradient. Then the replicas of a stage
reduce-scatter as ever, and the pair of stages sums that shard only: V (D - 1) / D + V / D instead of
V (D - 1) / D + V.

In a format of blocks a `BlockReducer` reduces over the union. With the distributed optimizer it does so over the
replicas of either stage; the pair send each other their shards, and each adds what both messages say, so that both have
the same bits.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.metrics.traffic import all_reduce_bytes, exchanged_bytes, reduce_scatter_bytes
from optimus_cc_ext.techniques.block_reducer import BlockCodecs, BlockReducer, GatheredSum, sent_alone
from optimus_cc_ext.techniques.collective import all_reduce_sum
from optimus_cc_ext.techniques.grid import RankPlace

__all__ = ["FusedEmbeddingSync", "fused_bytes", "unfused_bytes", "union_ranks"]


def union_ranks(places: Iterable[RankPlace], stages: int) -> list[list[int]]:
    """The ranks of each fused group: the first and the last stage's replicas, per tensor-parallel rank.

    Each tensor-parallel rank holds another slice of the vocabulary, so slices are never summed with each other.
    The order is the same on every rank, which creating process groups needs.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for place in places:
        if place.stage in (0, stages - 1):
            groups[place.tensor_rank].append(place.rank)
    return [sorted(groups[tensor_rank]) for tensor_rank in sorted(groups)]


class FusedEmbeddingSync:
    """The one collective, on a rank of the first or the last stage.

    Args:
        group: the union of both stages' replicas; with the distributed optimizer the pair of stages.
        sharded: whether it is the distributed optimizer's.
        codecs: of its format; None: dense.
    """

    def __init__(self, group: dist.ProcessGroup, *, sharded: bool = False, codecs: BlockCodecs | None = None) -> None:
        self._group = group
        self.sharded, self.codecs, self.gauge = sharded, codecs, Gauge()
        self._of_union: BlockReducer | None = None
        self._of_pair: dict[int, GatheredSum] = {}
        """By number of values: a shard, or the whole embedding where Megatron wants that."""

    @property
    def nbytes(self) -> int:
        """Memory that is kept for messages."""
        union = 0 if self._of_union is None else self._of_union.nbytes
        return union + sum(pair.nbytes for pair in self._of_pair.values())

    def preallocate(self, gradient: torch.Tensor) -> None:
        """Make room for the messages of what `reduce` will get, once."""
        if self.codecs is None:
            return
        flat = gradient.view(-1)
        if self.sharded and flat.numel() not in self._of_pair:
            self._of_pair[flat.numel()] = GatheredSum(
                flat.numel(), flat.dtype, flat.device, self._group, self.codecs.gradients, self.gauge
            )
        elif not self.sharded and self._of_union is None:
            self._of_union = BlockReducer(
                flat, [gradient], [], sharded=False, group=self._group, codecs=self.codecs, gauge=self.gauge
            )

    def reduce(self, gradient: torch.Tensor) -> None:
        """Sum the embedding's gradient, already scaled by 1/D, in place.

        Args:
            gradient: (vocabulary / T, hidden), the `main_grad` of the tied weight, not yet reduced over D; with the
                distributed optimizer its flat local shard, reduced over D. The same memory each time.
        """
        purpose = "fused embedding synchronisation"
        self.preallocate(gradient)
        if self._of_union is not None:
            self._of_union.reduce()
        elif self._of_pair:
            self._of_pair[gradient.numel()].reduce(gradient.view(-1), purpose)
        else:
            all_reduce_sum(gradient, self._group, purpose)


def unfused_bytes(nbytes: int, data_parallel: int, *, sharded: bool = False) -> int:
    """Bytes per rank of Megatron's two collectives: over D replicas, then over the pair of stages."""
    over_replicas = reduce_scatter_bytes if sharded else all_reduce_bytes
    return over_replicas(nbytes, data_parallel) + all_reduce_bytes(nbytes, 2)


def fused_bytes(
    nbytes: int,
    data_parallel: int,
    *,
    sharded: bool = False,
    codecs: BlockCodecs | None = None,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes per rank of what is done instead; of `codecs` and the gradient's `dtype` where they are not sent dense."""
    if codecs is None and not sharded:
        return all_reduce_bytes(nbytes, 2 * data_parallel)
    if codecs is None:
        return reduce_scatter_bytes(nbytes, data_parallel) + all_reduce_bytes(nbytes // data_parallel, 2)
    numel = nbytes // dtype.itemsize
    ranks = data_parallel if sharded else 2 * data_parallel
    sent = sent_alone(numel, dtype, ranks, sharded, codecs)
    if sharded:
        sent += exchanged_bytes(codecs.gradients.message_bytes(BlockLayout.of_one(numel // data_parallel), dtype), 2)
    return sent
