"""Reducers of flat tensors: their interface with three phases, the dense reducer, and the order of several reductions.

`exchange.Exchange` reduces in blocks of few bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from optimus_cc_ext.collectives.calls import PendingCollective, start_reduce_scatter, start_sum
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Leg, Span, all_reduce, sharded
from optimus_cc_ext.collectives.messages import Tools
from optimus_cc_ext.collectives.ranges import Range, views
from optimus_cc_ext.collectives.ring import Slice
from optimus_cc_ext.compressors.blocks import joined


class Reducer(ABC):
    """Interface of the objects that replace gradients in a bucket by their sums over the replicas, in three phases.

    All replicas call the phases of all their reducers in the same order. A reducer knows the bucket from `start` to
    `finish`, and neither before nor afterwards, because a training loop may move it (module `bucket`).
    """

    plan: Any
    """Plan of the reduction, a `bucket_plan.ReductionPlan`, which knows the bytes of messages and of memory."""

    slices: Sequence[Slice] = ()
    """Slices by which it uses the ring of message buffers."""

    encoded = 0
    """Number of gradients that were compressed so far; a gradient counts once in every reduction."""

    @property
    def sends_later(self) -> bool:
        """True if the second phase of the reduction that has begun sends something."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of memory of its own for messages."""
        return 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of the memory that this reducer shares with the other reducers of its technique."""
        return 0

    def reduce(self, flat: torch.Tensor, whole: bool = False) -> None:
        """Replace the gradients by their sums, with all three phases at once."""
        self.start(flat, whole)
        self.finish()

    @abstractmethod
    def start(self, flat: torch.Tensor, whole: bool = False) -> None:
        """Begin: the gradients are complete, and must not change until `finish`.

        Args:
            flat: the bucket, one dimension, as its plan has it.
            whole: with a shard, True if gradients outside of it are needed as well; otherwise they are undefined.
        """

    @abstractmethod
    def second_phase(self) -> None:
        """Wait for the first collectives, and start those that depend on them; does nothing if that was done
        already.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for the remaining collectives, after `second_phase` if nobody has called it. The bucket, which then
        holds the sums, is dropped.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class DensePlan:
    """Plan of a dense sum of a bucket, or of some of its ranges, by the native collective, with as few bytes as
    Megatron.

    Args:
        numel: elements of the bucket.
        dense: the ranges that are summed; the whole bucket, if it is `sharded`.
        sharded: True if a rank needs only its shard of the bucket.
        instances: number of instances of the distributed optimizer.
    """

    numel: int
    dense: Sequence[Range]
    dtype: torch.dtype
    ranks: int
    sharded: bool
    instances: int = 1

    matrices = 0

    def bind(self, groups: Groups, tools: Tools) -> "DenseReducer":
        """Make the reducer that follows this plan."""
        return DenseReducer(self, groups)

    @cached_property
    def runs(self) -> list[Range]:
        """Ranges that are reduced by one collective each; adjacent ranges are joined."""
        return [(0, self.numel)] if self.sharded else list(joined(self.dense))

    def legs(self, beside: int = 1, whole: bool = False) -> list[Leg]:
        """Return the collectives of one rank, whose node holds `beside` ranks; `whole` is that of `Reducer.start`."""
        nbytes, span = sum(length for _, length in self.runs) * self.dtype.itemsize, Span(self.ranks, beside)
        return sharded(nbytes, span, self.instances) if self.sharded and not whole else [all_reduce(nbytes, span)]


class DenseReducer(Reducer):
    """Reducer that sums gradients uncompressed, in place."""

    _purpose = "dense gradient reduction"

    def __init__(self, plan: DensePlan, groups: Groups) -> None:
        self.plan, self._groups = plan, groups
        self._sums: list[PendingCollective] = []

    @torch.no_grad()
    def start(self, flat: torch.Tensor, whole: bool = False) -> None:
        if self.plan.sharded and not whole:
            (first, length), groups = self._groups.own_range(flat.numel()), self._groups
            shard = flat[first : first + length]
            self._sums = [start_reduce_scatter(shard, flat, groups.owners, self._purpose)]
            if groups.levels.instances:
                assert groups.rail is not None, "instances have a group between them"
                self.finish()
                self._sums = [start_sum(shard, groups.rail, self._purpose)]
        else:
            runs = views(flat, self.plan.runs)
            self._sums = [start_sum(run, self._groups.whole, self._purpose) for run in runs]

    @property
    def sends_later(self) -> bool:
        return False

    def second_phase(self) -> None:
        """Do nothing: a dense sum has no second phase."""

    def finish(self) -> None:
        for pending in self._sums:
            pending.wait()
        self._sums = []


class SideStream:
    """CUDA stream of our own, which waits for the current stream when work is handed over, and is waited for by `join`.

    On a CPU the work runs at once. Work on this stream must not share scratch memory with work on another one, because
    only the stream that uses the memory knows when it is free.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Run the work in the context after everything that the current stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream start its later work after the work of this stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class Reduction:
    """Reduction of a bucket group: it begins when it is made, and ends in `wait`, which `finish_grad_sync` calls.

    The reductions of a rank form a pipeline of two phases. A reduction that begins also begins the `second_phase` of
    the reduction before it, so that the second phase (factors Q, or the gather of sums) runs during the backward pass.
    Only the last reduction's second phase begins in `wait`, and each that sends nothing: the sums of a shard are added
    up where they are waited for, as a kernel that waits for messages can hold up the backward pass (`param_gather`).
    Replicas begin reductions in the same order, and so their collectives match.

    Args:
        flats: the bucket of each reducer.
        under_way: the reducers of this rank whose second phase has to begin; all its reductions share the list.
        side: the stream for the work, if the backward pass goes on meanwhile.
        whole: True if each replica needs whole gradients, also if its optimizer reads a shard.
    """

    def __init__(
        self,
        reducers: Sequence[Reducer],
        flats: Sequence[torch.Tensor],
        under_way: list[Reducer],
        side: SideStream | None,
        *,
        whole: bool,
    ) -> None:
        self._reducers, self._under_way, self._side = reducers, under_way, side
        with self._beside():
            for reducer, flat in zip(reducers, flats, strict=True):
                reducer.start(flat, whole)
            # Earlier reductions continue after this one's first phase is posted, so that it runs while they are waited
            # for.
            self._go_on()
        under_way.extend(reducer for reducer in reducers if reducer.sends_later)

    def wait(self) -> None:
        """Finish the reduction; work that the current stream gets afterwards sees the sums in the buckets."""
        with self._beside():
            self._go_on()
            for reducer in self._reducers:
                reducer.finish()
        if self._side is not None:
            self._side.join()

    def _go_on(self) -> None:
        for reducer in self._under_way:
            reducer.second_phase()
        self._under_way.clear()

    def _beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._side is None else self._side.work()
