"""Selective stage compression (paper section 7): PowerSGD with error feedback for data-parallel gradients.

1F1B ends last on the first stages, so their reduction is what an iteration waits for; only they are compressed.

PowerSGD (Vogels et al. 2019, algorithm 2) on the gradients M_d of D replicas:

    M_d += E_d;  P = sum_d M_d Q;  P = orthogonal(P);  Q = sum_d M_d^T P;  G = P Q^T;  E_d = M_d - G / D

The residuals of all replicas together are what the sum lacks: sum_d E_d = sum_d M_d - G. It is always a *sum*: for a
mean over the replicas the gradients come scaled by 1/D. With a per-token loss they come unscaled, and everything is
divided by the number of tokens afterwards: a residual then counts per token, as the gradient that it came from.

G itself is rebuilt only where it is read: with the distributed optimizer each replica rebuilds the rows of its own
shard, unless Megatron asks for whole gradients (`--save-wgrads-interval`). E_d, which lacks all of G, is computed from
the factors without rebuilding it.

In a bf16 bucket P and Q travel in bf16 as well: bytes are what a bf16 bucket is for, and with fp32 factors the
compression rank at which anything is saved would halve. It costs no accuracy that bf16 sums would not cost: the basis
that Q is computed with is orthogonalised from the received sum, in fp32, on every replica alike, so rounding P only
turns it a little; what rounding Q loses goes into the residual with all else that G lacks, and what rounding G into the
bucket loses goes into the residuals of those who read it there.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors import (
    LowRank,
    Scratch,
    effective_rank,
    initial_factor,
    next_warm_start,
    packed_numel,
    pays,
    private_generator,
)
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.collective import PendingSum, all_reduce_sum
from optimus_cc_ext.techniques.gauge import Gauge
from optimus_cc_ext.techniques.stepped import SteppedTensor, note_finite

__all__ = ["BucketReducer", "reduced_bytes", "stages_to_compress", "warmup_iterations", "worth_compressing"]

PACKED_UP_TO_BYTES = 1 << 20
"""Dense runs of a bucket up to this size travel with P in one collective; longer ones are reduced in place."""


def stages_to_compress(config: DataParallelCompressionConfig, stages: int) -> frozenset[int] | None:
    """Which of the stages 0 .. stages - 1 compress their gradients; None: that is to be found out (`auto`)."""
    if not config.dp_compression:
        return frozenset()
    if config.dp_compression_stages == "auto":
        return None
    return frozenset(range(stages if config.dp_compression_stages == "all" else config.dp_compression_stages))


def warmup_iterations(config: DataParallelCompressionConfig, train_iters: int | None) -> int:
    """How many iterations at the start of the run are reduced uncompressed."""
    return int(config.dp_compression_warmup * (train_iters or 0))


def worth_compressing(gradient: torch.Tensor, compression_rank: int, force: bool) -> bool:
    """Whether a gradient is a matrix on which the factorisation saves anything."""
    if gradient.dim() < 2:
        return False
    rows = gradient.shape[0]
    return force or pays(rows, gradient.numel() // rows, compression_rank)


def reduced_bytes(matrices: Sequence[torch.Tensor], dense: Sequence[torch.Tensor], compression_rank: int) -> int:
    """Bytes that a `BucketReducer` of these gradients sums, before there is one: all P, all Q, and what is dense."""
    factors = 0
    for matrix in matrices:
        rows = matrix.shape[0]
        columns = matrix.numel() // rows
        wire = torch.bfloat16 if matrix.dtype == torch.bfloat16 else torch.float32
        factors += packed_numel(rows, columns, effective_rank(rows, columns, compression_rank)) * wire.itemsize
    return factors + sum(gradient.nbytes for gradient in dense)


class BucketReducer:
    """Reduces one gradient bucket over its data-parallel group: matrices as P and Q, the rest as it is.

    Args:
        matrices: views into the bucket, each of two dimensions or more, fp32 or bf16; they are compressed.
        dense: flat views into the bucket; they are summed as they are.
        shard: the flat view into the bucket that this replica's optimizer reads; None: all of it.
        group: the bucket's data-parallel group.
        salt: tells this bucket's random start apart from others of the run; equal on all replicas, and on all
            tensor-parallel ranks, whose replicated parameters must stay equal.
        state_dtype: what residuals and warm starts are kept in, fp32 or bf16.
        gauge: measures what compression leaves out and costs.
        scratch: memory for intermediate results, that several reducers on one stream can share.
    """

    def __init__(
        self,
        matrices: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        *,
        shard: torch.Tensor | None = None,
        group: dist.ProcessGroup,
        compressor: LowRank,
        config: DataParallelCompressionConfig,
        seed: int,
        salt: str,
        state_dtype: torch.dtype = torch.float32,
        scratch: Scratch | None = None,
        gauge: Gauge | None = None,
    ) -> None:
        self._scratch = scratch or Scratch()
        self._gauge = gauge or Gauge(self._scratch)
        self._group, self._compressor, self._config = group, compressor, config
        by_shape: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        for matrix in matrices:
            flat = matrix.view(matrix.shape[0], -1)
            by_shape[flat.shape[0], flat.shape[1]].append(flat)
        self._groups = [
            _SameShape(views, shard, config, seed, f"{salt}/{rows}x{columns}", state_dtype)
            for (rows, columns), views in by_shape.items()
        ]
        runs = _contiguous_runs(dense)
        self._in_place = [run for run in runs if run.nbytes > PACKED_UP_TO_BYTES or not self._groups]
        self._packed = [run for run in runs if run.nbytes <= PACKED_UP_TO_BYTES and self._groups]
        self._pending: list[PendingSum] = []
        self._allocate_wire()

    def reduce(self, whole: bool = False) -> None:
        """Replace the views of the bucket by their sums over the group; nothing is left outstanding."""
        self.start()
        self.finish(whole)

    @torch.no_grad()
    def start(self) -> None:
        """Begin: the gradients are complete, and must not change until `finish`."""
        self._pending = [PendingSum(run, self._group, "dense gradient reduction") for run in self._in_place]
        if not self._groups:
            return
        with self._gauge.timed(self._first_phase.device):
            for same in self._groups:
                self._compressor.project(same.gather(self._scratch), same.warm_start.value, out=same.p)
                _put(same.p, same.p_wire)
        for run, slot in zip(self._packed, self._dense_slots, strict=True):
            slot.copy_(run)
        self._pending.append(PendingSum(self._first_phase, self._group, "compressed gradient reduction (P)"))

    @torch.no_grad()
    def finish(self, whole: bool = False) -> None:
        """Wait for what `start` began, do the second phase, and write the sums into the bucket.

        With a shard, matrices outside of it keep what they held, unless they are wanted `whole`.
        """
        for pending in self._pending:
            pending.wait()
        if not self._groups:
            return
        device = self._first_phase.device
        with self._gauge.timed(device):
            for same in self._groups:
                note_finite(same.finite, same.p_wire, self._scratch)
                self._compressor.orthogonalize(same.p_wire, out=same.p)
                matrices = same.gathered(self._scratch)
                self._compressor.back_project(matrices, same.p, out=same.q)
                self._gauge.note_projection(matrices, same.q)
                _put(same.q, same.q_wire)
        all_reduce_sum(self._second_phase, self._group, "compressed gradient reduction (Q)")
        with self._gauge.timed(device):
            for same in self._groups:
                same.scatter(self._compressor, self._group.size(), self._scratch, whole)
        for run, slot in zip(self._packed, self._dense_slots, strict=True):
            run.copy_(slot)

    @property
    def reduced_bytes(self) -> int:
        """Bytes that its collectives sum instead."""
        compressed = self._first_phase.nbytes + self._second_phase.nbytes if self._groups else 0
        return compressed + sum(run.nbytes for run in self._in_place)

    @property
    def matrices(self) -> int:
        """How many matrices are compressed."""
        return sum(len(same.views) for same in self._groups)

    @property
    def state_nbytes(self) -> int:
        """Bytes of residuals and factors."""
        return sum(same.nbytes for same in self._groups)

    def residuals(self) -> list[torch.Tensor]:
        """The error feedback memory (matrices, rows, columns) of every group of equally shaped matrices."""
        return [same.residual.value for same in self._groups]

    def warm_starts(self) -> list[torch.Tensor]:
        """The Q (matrices, columns, compression rank) that the next step starts from, group by group."""
        return [same.warm_start.value for same in self._groups]

    def commit(self) -> None:
        """The optimizer's step counted: keep what it put into residuals and warm starts, if it is finite."""
        for same in self._groups:
            same.residual.commit(same.finite)
            same.warm_start.commit(same.finite)
            same.finite.fill_(True)

    def follow_loss_scale(self, factor: torch.Tensor) -> None:
        """Gradients come multiplied by `factor`, a 0-dim tensor, compared to the last iteration's: so do residuals."""
        for same in self._groups:
            same.residual.rescale(factor)

    def rollback(self) -> None:
        """The step is repeated or skipped: forget what it put into residuals and warm starts."""
        for same in self._groups:
            same.residual.rollback()
            same.warm_start.rollback()
            same.finite.fill_(True)

    def state_dict(self) -> dict[str, Any]:
        """What the bucket remembers of steps that counted, as tensors (not copies)."""
        return {
            "groups": [
                {"residual": same.residual.committed, "warm_start": same.warm_start.committed} for same in self._groups
            ]
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; what the bucket remembers is replaced.

        Raises:
            ValueError: it belongs to a bucket of other matrices; then nothing is changed.
        """
        if reason := self.mismatch(state_dict):
            raise ValueError(reason)
        for same, loaded in zip(self._groups, state_dict["groups"], strict=True):
            same.residual.restore(loaded["residual"])
            same.warm_start.restore(loaded["warm_start"])

    def mismatch(self, state_dict: dict[str, Any]) -> str | None:
        """Why `load_state_dict` would refuse, or None."""
        found, expected = (
            [(tuple(group["residual"].shape), tuple(group["warm_start"].shape)) for group in groups]
            for groups in (state_dict["groups"], self.state_dict()["groups"])
        )
        if found != expected:
            return f"residuals and warm starts of {found} where a bucket has {expected}"
        return None

    def _allocate_wire(self) -> None:
        """One flat buffer per phase: all P and the packed dense runs, then all Q."""
        like = next((view for same in self._groups for view in same.views), None)
        if like is None:
            return
        p_sizes = [same.p_shape.numel() for same in self._groups]
        dense_size = sum(run.numel() for run in self._packed)
        dtype = torch.bfloat16 if like.dtype == torch.bfloat16 else torch.float32
        self._first_phase = torch.empty(sum(p_sizes) + dense_size, dtype=dtype, device=like.device)
        *p_flat, self._dense_wire = self._first_phase.split([*p_sizes, dense_size])
        q_sizes = [same.q_shape.numel() for same in self._groups]
        self._second_phase = torch.empty(sum(q_sizes), dtype=dtype, device=like.device)
        for same, p, q in zip(self._groups, p_flat, self._second_phase.split(q_sizes), strict=True):
            same.use_wire(p.view(same.p_shape), q.view(same.q_shape))
        self._dense_slots = self._dense_wire.split([run.numel() for run in self._packed])


class _SameShape:
    """The matrices of one shape in a bucket, as one batch, and what is remembered about them."""

    def __init__(
        self,
        views: list[torch.Tensor],
        shard: torch.Tensor | None,
        config: DataParallelCompressionConfig,
        seed: int,
        salt: str,
        state_dtype: torch.dtype,
    ) -> None:
        self.views = views
        self._shards = None if shard is None else [_overlap(view, shard) for view in views]
        self._feedback = config.dp_error_feedback
        rows, columns = views[0].shape
        rank = effective_rank(rows, columns, config.dp_compression_rank)
        device = views[0].device
        self.p_shape = torch.Size((len(views), rows, rank))
        self.q_shape = torch.Size((len(views), columns, rank))
        generator = private_generator(seed, "dp-compression", salt, device=device)
        self.fresh_directions = initial_factor(len(views), columns, rank, generator=generator, device=device)
        self.warm_start = SteppedTensor(self.fresh_directions.to(state_dtype, copy=True))
        self.residual = SteppedTensor(torch.zeros(len(views), rows, columns, dtype=state_dtype, device=device))
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def use_wire(self, p_wire: torch.Tensor, q_wire: torch.Tensor) -> None:
        """Take the slots of P and Q in the messages; they are computed in fp32, in place where the wire is fp32."""
        self.p_wire, self.q_wire = p_wire, q_wire
        self.p, self.q = p_wire.float(), q_wire.float()

    @property
    def nbytes(self) -> int:
        return self.residual.nbytes + self.warm_start.nbytes + self.fresh_directions.nbytes

    def gather(self, scratch: Scratch) -> torch.Tensor:
        """(matrices, rows, columns): the bucket's gradients as one batch, with the residual added."""
        batch = self.residual.workspace(scratch)
        for slot, view in zip(batch, self.views, strict=True):
            slot.copy_(view)
        return batch.add_(self.residual.value) if self._feedback else batch

    def gathered(self, scratch: Scratch) -> torch.Tensor:
        """What `gather` returned before a collective: still there, or, where scratch memory held it, made again."""
        return self.residual.workspace(scratch) if self.residual.is_wide else self.gather(scratch)

    def scatter(self, compressor: LowRank, ranks: int, scratch: Scratch, whole: bool) -> None:
        """Rebuild the reduced gradients in the bucket, where they are read, and remember what they lack."""
        _put(self.q_wire, self.q)
        residual = None
        if self._feedback:
            residual = self.gathered(scratch)
            compressor.deflate(residual, self.p, self.q, share=1.0 / ranks)
        shards = None if whole else self._shards
        for index, view in enumerate(self.views):
            part = shards[index] if shards else slice(0, view.numel())
            lost = self._rebuild(compressor, index, part, scratch)
            if lost is not None and residual is not None:
                # What was rounded away goes back once: to its only reader, or in equal shares to all.
                residual[index].view(-1)[part].add_(lost, alpha=1.0 if shards else 1.0 / ranks)
        if residual is not None:
            self.residual.write(residual)
        start = scratch.take("start", self.q_shape, torch.float32, self.p.device)
        next_warm_start(self.q, self.fresh_directions, compressor, out=start, scratch=scratch)
        self.warm_start.write(start)

    def _rebuild(self, compressor: LowRank, index: int, part: slice, scratch: Scratch) -> torch.Tensor | None:
        """Write a part of one reduced gradient into the bucket; in fp32 the rows that it touches.

        Returns what rounding to the bucket's dtype took from that part, flat, if it rounds.
        """
        view = self.views[index]
        columns = view.shape[1]
        rows = slice(part.start // columns, -(-part.stop // columns))
        if rows.start >= rows.stop:
            return None
        p, q = self.p[index : index + 1, rows], self.q[index : index + 1]
        if view.dtype == self.p.dtype:
            compressor.reconstruct(p, q, out=view[rows].unsqueeze(0))
            return None
        rebuilt = scratch.take("rebuilt", (1, rows.stop - rows.start, columns), torch.float32, view.device)
        compressor.reconstruct(p, q, out=rebuilt)
        exact = rebuilt.view(-1)[part.start - rows.start * columns : part.stop - rows.start * columns]
        return exact.sub_(view.view(-1)[part].copy_(exact))


def _overlap(view: torch.Tensor, shard: torch.Tensor) -> slice:
    """Which of a view's elements, numbered flat, lie in a shard of the same storage."""
    first = shard.storage_offset() - view.storage_offset()
    start, stop = (min(max(end, 0), view.numel()) for end in (first, first + shard.numel()))
    return slice(start, stop)


def _put(values: torch.Tensor, into: torch.Tensor) -> None:
    """Round, or take over what was rounded; nothing to do between tensors of one dtype, which hold the same already."""
    if values.dtype != into.dtype:
        into.copy_(values)


def _contiguous_runs(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join flat views that lie next to each other in one storage."""
    runs: list[torch.Tensor] = []
    for view in sorted(views, key=lambda v: v.storage_offset()):
        last = runs[-1] if runs else None
        if last is not None and last.storage_offset() + last.numel() == view.storage_offset():
            runs[-1] = last.as_strided((last.numel() + view.numel(),), (1,))
        else:
            runs.append(view)
    return runs
