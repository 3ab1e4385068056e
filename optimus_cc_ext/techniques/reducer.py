"""What reduces one gradient bucket over its replicas: the phases that all ways of it have, and the plain way."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from optimus_cc_ext.metrics.traffic import all_reduce_bytes, reduce_scatter_bytes
from optimus_cc_ext.techniques.collective import PendingCollective, start_reduce_scatter, start_sum

__all__ = ["DenseReducer", "Reducer", "contiguous_runs"]


class Reducer(Protocol):
    """Replaces gradients in a bucket by their sums over the replicas, in three phases.

    All replicas call the phases of all their reducers in the same order.
    """

    @property
    def matrices(self) -> int:
        """How many gradients are compressed."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that is kept for messages."""
        ...

    @property
    def encoded(self) -> int:
        """The number of gradients that were compressed so far, counted anew in every reduction."""
        ...

    def sent_bytes(self, whole: bool = False) -> int:
        """Bytes that this replica sends, by the formulas of `metrics.traffic`."""
        ...

    def start(self, whole: bool = False) -> None:
        """Begin: the gradients are complete, and must not change until `finish`.

        Args:
            whole: with a shard, whether gradients outside of it are wanted as well; else they are undefined.
        """
        ...

    def second_phase(self) -> None:
        """Wait for the first collectives, start those that follow from them; once, if that was not done since."""
        ...

    def finish(self) -> None:
        """Wait for what is outstanding, `second_phase` if nobody called it; the sums are in the bucket."""
        ...


class DenseReducer:
    """Sums gradients as they are, in place, with as few bytes as Megatron.

    Args:
        flat: the bucket, one dimension.
        gradients: views into it.
        sharded: whether this replica reads its part of the bucket only, which then has to be all in `gradients`.
        purpose: what an error calls it.
    """

    matrices = 0
    nbytes = 0
    encoded = 0

    def __init__(
        self,
        flat: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        *,
        sharded: bool,
        group: dist.ProcessGroup,
        purpose: str = "dense gradient reduction",
    ) -> None:
        self._group, self._sharded, self._purpose = group, sharded, purpose
        self._runs = [flat] if sharded else contiguous_runs([gradient.view(-1) for gradient in gradients])
        self._sums: list[PendingCollective] = []

    def sent_bytes(self, whole: bool = False) -> int:
        """See `Reducer`."""
        nbytes, ranks = sum(run.nbytes for run in self._runs), self._group.size()
        return (reduce_scatter_bytes if self._sharded and not whole else all_reduce_bytes)(nbytes, ranks)

    @torch.no_grad()
    def start(self, whole: bool = False) -> None:
        """See `Reducer`."""
        if self._sharded and not whole:
            (flat,) = self._runs
            shard = flat.view(self._group.size(), -1)[self._group.rank()]
            self._sums = [start_reduce_scatter(shard, flat, self._group, self._purpose)]
        else:
            self._sums = [start_sum(run, self._group, self._purpose) for run in self._runs]

    def second_phase(self) -> None:
        """See `Reducer`: there is none."""

    def finish(self) -> None:
        """See `Reducer`."""
        for pending in self._sums:
            pending.wait()
        self._sums = []


def contiguous_runs(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join flat views that lie next to each other in one storage."""
    runs: list[torch.Tensor] = []
    for view in sorted(views, key=lambda v: v.storage_offset()):
        last = runs[-1] if runs else None
        if last is not None and last.storage_offset() + last.numel() == view.storage_offset():
            runs[-1] = last.as_strided((last.numel() + view.numel(),), (1,))
        else:
            runs.append(view)
    return runs
