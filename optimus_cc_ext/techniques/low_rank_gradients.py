"""Low-rank reduction of one gradient bucket over its replicas: matrices as P and Q, the other gradients dense.

PowerSGD (Vogels et al. 2019, algorithm 2) on the gradients M_d of D replicas:

    1. M_d += E_d
    2. P = sum_d M_d Q                  start
    3. P = orth(P)
    4. Q = sum_d M_d^T P                second_phase
    5. G = P Q^T
    6. E_d = M_d - G / D                finish

The residuals of all replicas together are the error of the sum: sum_d E_d = sum_d M_d - G. The result is always a
*sum*: for a mean over the replicas the gradients come scaled by 1/D. With a per-token loss they come unscaled, and the
sum is divided by the number of tokens afterwards: a residual then counts per token, as the gradient that it came from.

Equally shaped matrices are one batch, so a bucket costs the same number of kernels at any number of layers. The shapes
are cut into a few packs (one if the model is small): while the P of a pack are summed, the next pack is projected;
while its Q are summed, the next P is orthogonalised, and so on.

G itself is rebuilt only where it is read: with the distributed optimizer each replica rebuilds the rows of its own
shard. In a bf16 bucket P and Q are sent in bf16, and the rounding error goes into the residual
(docs/develop/how-it-works.md).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from optimus_cc_ext.collectives.calls import PendingCollective, start_sum
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Leg, Span, all_reduce
from optimus_cc_ext.collectives.messages import Tools
from optimus_cc_ext.collectives.ranges import Range
from optimus_cc_ext.collectives.reducers import Reducer
from optimus_cc_ext.compressors.blocks import joined
from optimus_cc_ext.compressors.low_rank import LowRank, effective_rank
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.shape_group import EqualMatrices, ShapeGroup, copy_if_cast
from optimus_cc_ext.techniques.state import FactorStates, state_bytes
from optimus_cc_ext.techniques.strided import progressions

PACKED_UP_TO_BYTES = 1 << 20
"""Largest size of dense runs of a bucket that are sent with P in one collective; longer runs are reduced in place."""

PACK_AT_LEAST_BYTES = 256 << 10
"""Bytes that a collective has to carry to be worth its latency. P and Q of a small model each fit in one collective."""

MOST_PACKS = 4
"""Largest number of packs, so of collectives per phase: with several, the next matrices are projected during a sum."""


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


@dataclass(frozen=True, kw_only=True)
class LowRankTools(Tools):
    """Tools of a low-rank plan: also its compressor, and its place in state and random numbers."""

    compressor: LowRank
    config: DataParallelCompressionConfig
    states: FactorStates
    """Container of residuals and warm starts."""

    name: str
    """Prefix of the names of this bucket's states."""

    seed: int
    salt: str
    """Makes this bucket's random start different from others of the run. It is equal on all replicas, and on all
    tensor-parallel ranks, whose replicated parameters must stay equal.
    """

    state_dtype: torch.dtype = torch.float32
    """Dtype of residuals and warm starts, fp32 or bf16."""


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

    def bind(self, groups: Groups, tools: LowRankTools) -> "LowRankReducer":
        """Make the reducer that follows this plan."""
        return LowRankReducer(self, groups, tools)

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

    def legs(self, beside: int = 1, whole: bool = False) -> list[Leg]:
        """Return the sums of one rank, whose node holds `beside` ranks: the same for a shard and for the whole."""
        dense = sum(length for _, length in self.runs) * self.dtype.itemsize
        return [all_reduce(self.wire_bytes + dense, Span(self.ranks, beside))]

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of memory for residuals, warm starts and fallback directions, which are kept in `dtype`."""
        return sum(len(s.starts) * state_bytes(s.rows, s.columns, self.rank, dtype) for s in self.shapes)


def _cuts(numel: int, runs: Sequence[Range]) -> tuple[list[int], list[int]]:
    """Return the sizes of the pieces into which runs cut a bucket, so that one call of torch makes all their views, and
    the places of the runs among the pieces.
    """
    sizes: list[int] = []
    places: dict[Range, int] = {}
    for start, length in sorted(runs):
        sizes += [start - sum(sizes), length]
        places[start, length] = len(sizes) - 1
    return [*sizes, numel - sum(sizes)], [places[run] for run in runs]


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


@dataclass
class _Pack:
    """Memory of a `PackPlan`; its two messages are summed in place."""

    groups: list[ShapeGroup]
    first: torch.Tensor
    """Message of all P, and in the first pack of the small dense runs."""

    second: torch.Tensor
    """Message of all Q."""

    sum: PendingCollective | None = None
    """The sum that is under way."""

    def wait(self) -> None:
        """Wait for the sum that is under way, if there is one."""
        if self.sum is not None:
            self.sum.wait()
            self.sum = None


class LowRankReducer(Reducer):
    """Reducer that sums matrices as P and Q, and other gradients dense, in a bucket in fp32 or bf16."""

    plan: LowRankPlan

    def __init__(self, plan: LowRankPlan, groups: Groups, tools: LowRankTools) -> None:
        self.plan, self._device, self._groups, self._gauge = plan, tools.device, groups, tools.gauge
        self._scratch, self._compressor, self.states = tools.scratch, tools.compressor, tools.states
        # Warm starts are made on the stream of the optimizer's step, so with memory of their own.
        self.states.make_warm_starts(type(tools.compressor)(), Scratch())
        shard = groups.own_range(plan.numel) if plan.sharded else None
        shape_groups = [
            ShapeGroup(
                same, tools.device, shard, tools.config, states=tools.states, name=f"{tools.name}: {same.name}",
                seed=tools.seed, salt=f"{tools.salt}/{same.rows}x{same.columns}", state_dtype=tools.state_dtype,
            )
            for same in plan.shapes
        ]  # fmt: skip
        self._slots: list[torch.Tensor] = []
        """Slots of the small dense runs in the first message."""

        self._sizes, self._dense_at = _cuts(plan.numel, [run for pack in plan.packs for run in pack.dense])

        self._runs: list[torch.Tensor] = []
        """Between `start` and `finish`, the small dense runs themselves."""

        left = iter(shape_groups)
        self._packs = [self._allocate(pack, [next(left) for _ in pack.shapes]) for pack in plan.packs]
        self._whole = False
        self._outstanding: Sequence[_Pack] = ()  # packs whose P are being summed
        self._dense_sums: list[PendingCollective] = []

    @property
    def nbytes(self) -> int:
        return sum(pack.first.nbytes + pack.second.nbytes for pack in self._packs)

    def _allocate(self, plan: PackPlan, groups: list[ShapeGroup]) -> _Pack:
        """Allocate the messages of a pack, one for its P and dense runs, and one for its Q; both are flat."""
        first, second = (
            torch.empty(sum(sizes), dtype=self.plan.wire_dtype, device=self._device)
            for sizes in (plan.first, plan.second)
        )
        slots = first.split(plan.first)
        for same, p, q in zip(groups, slots, second.split(plan.second), strict=False):
            same.use_wire(p.view(same.p_shape), q.view(same.q_shape))
        self._slots += slots[len(groups) :]
        return _Pack(groups, first, second)

    def _sum_of(self, message: torch.Tensor, name: str) -> PendingCollective:
        return start_sum(message, self._groups.whole, f"compressed gradient reduction ({name})")

    @torch.no_grad()
    def start(self, flat: torch.Tensor, whole: bool = False) -> None:
        """Project each pack and start the sums of P. With a shard, matrices outside of it are written only if
        `whole`.
        """
        self._whole, self._outstanding = whole, self._packs
        self.encoded += self.plan.matrices
        pieces = flat.split(self._sizes) if self._dense_at else ()
        self._runs = [pieces[at] for at in self._dense_at]
        if self._runs:
            torch._foreach_copy_(self._slots, self._runs)
        for pack in self._packs:
            with self._gauge.timed(self._device):
                for same in pack.groups:
                    same.project(flat, self._compressor, self._scratch)
                    copy_if_cast(same.p, same.p_wire)
            pack.sum = self._sum_of(pack.first, "P")
        # Dense sums start after those of P, which are waited for first, and so run while Q is computed.
        in_place = (flat[start : start + length] for start, length in self.plan.runs)
        self._dense_sums = [start_sum(run, self._groups.whole, "dense gradient reduction") for run in in_place]

    @torch.no_grad()
    def second_phase(self) -> None:
        """Wait for each P and start the sum of the Q that is computed from it."""
        packs, self._outstanding = self._outstanding, ()
        for pack in packs:
            pack.wait()
            with self._gauge.timed(self._device):
                for same in pack.groups:
                    same.state.note_finite(same.p_wire, self._scratch)
                # All shapes are factorised at once: on a GPU many factorisations take as long as one.
                self._compressor.orthogonalize_all([s.p_wire for s in pack.groups], [s.p for s in pack.groups])
                for same in pack.groups:
                    matrices = same.matrices(self._scratch)
                    self._compressor.back_project(matrices, same.p, out=same.q)
                    self._gauge.note_projection(matrices, same.q)
                    copy_if_cast(same.q, same.q_wire)
            pack.sum = self._sum_of(pack.second, "Q")

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all sums, and write the gradients into the bucket."""
        self.second_phase()
        for pack in self._packs:
            pack.wait()
            with self._gauge.timed(self._device):
                for same in pack.groups:
                    same.rebuild(self._compressor, self.plan.ranks, self._scratch, self._whole)
        if self._runs:
            torch._foreach_copy_(self._runs, self._slots)
        for dense_sum in self._dense_sums:
            dense_sum.wait()
        self._runs, self._dense_sums = [], []
