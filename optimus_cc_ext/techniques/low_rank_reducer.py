"""Reducer of one gradient bucket over its replicas: matrices as P and Q, the other gradients dense.

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

`low_rank_plan` decides which matrices are one batch, and which P and Q share a collective.

G itself is rebuilt only where it is read: with the distributed optimizer each replica rebuilds the rows of its own
shard. In a bf16 bucket P and Q are sent in bf16, and the rounding error goes into the residual
(docs/develop/how-it-works.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.collective import PendingCollective, start_sum
from optimus_cc_ext.techniques.exchange import Groups, Range
from optimus_cc_ext.techniques.low_rank_plan import LowRankPlan, PackPlan
from optimus_cc_ext.techniques.reducers import Reducer
from optimus_cc_ext.techniques.shape_group import ShapeGroup, copy_if_cast
from optimus_cc_ext.techniques.state import FactorStates

__all__ = ["LowRankReducer"]


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
    """Reducer that sums matrices as P and Q, and other gradients dense.

    Args:
        device: the device of the bucket, which is in fp32 or bf16.
        shard: the range of the bucket that this replica's optimizer reads; None: the whole bucket.
        salt: makes this bucket's random start different from others of the run; equal on all replicas, and on all
            tensor-parallel ranks, whose replicated parameters must stay equal.
        states, name: the container of residuals and warm starts, and the prefix of their names.
        state_dtype: the dtype of residuals and warm starts, fp32 or bf16.
        gauge: measures the compression error, and the seconds of compression.
        scratch: memory for intermediate results, which several reducers on one stream can share.
    """

    def __init__(
        self,
        plan: LowRankPlan,
        device: torch.device,
        groups: Groups,
        *,
        shard: Range | None = None,
        compressor: LowRank,
        config: DataParallelCompressionConfig,
        seed: int,
        salt: str,
        states: FactorStates | None = None,
        name: str = "bucket 0",
        state_dtype: torch.dtype = torch.float32,
        scratch: Scratch | None = None,
        gauge: Gauge | None = None,
    ) -> None:
        self.plan, self._device, self._groups = plan, device, groups
        self._scratch = scratch or Scratch()
        self._gauge = gauge or Gauge(self._scratch)
        self._compressor = compressor
        self.states = states or FactorStates(config.dp_compression_rank)
        # Warm starts are made on the stream of the optimizer's step, so with memory of their own.
        self.states.make_warm_starts(type(compressor)(), Scratch())
        shape_groups = [
            ShapeGroup(
                same, device, shard, config, states=self.states, name=f"{name}: {same.name}", seed=seed,
                salt=f"{salt}/{same.rows}x{same.columns}", state_dtype=state_dtype,
            )
            for same in plan.shapes
        ]  # fmt: skip
        self._slots: list[torch.Tensor] = []
        """Slots of the small dense runs in the first message."""

        self._runs: list[torch.Tensor] = []
        """Between `start` and `finish`, the small dense runs themselves."""

        left = iter(shape_groups)
        self._packs = [self._allocate(pack, [next(left) for _ in pack.shapes]) for pack in plan.packs]
        self._whole = False
        self._outstanding: Sequence[_Pack] = ()  # packs whose P are being summed
        self._dense_sums: list[PendingCollective] = []

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
        self._runs = [flat[at : at + length] for pack in self.plan.packs for at, length in pack.dense]
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
