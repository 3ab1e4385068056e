"""Reduces one gradient bucket over its replicas: matrices as P and Q, the rest as it is.

PowerSGD (Vogels et al. 2019, algorithm 2) on the gradients M_d of D replicas:

    1. M_d += E_d
    2. P = sum_d M_d Q                  start
    3. P = orth(P)
    4. Q = sum_d M_d^T P                second_phase
    5. G = P Q^T
    6. E_d = M_d - G / D                finish

The residuals of all replicas together are what the sum lacks: sum_d E_d = sum_d M_d - G. It is always a *sum*: for a
mean over the replicas the gradients come scaled by 1/D. With a per-token loss they come unscaled, and everything is
divided by the number of tokens afterwards: a residual then counts per token, as the gradient that it came from.

Equally shaped matrices are one batch (`shape_group`), so a bucket costs the same number of kernels at any number of
layers. Its shapes are cut into a few packs (one where the model is small): while the P of a pack are summed, the next
pack is projected; while its Q are summed, the next P is orthogonalised, and so on.

G itself is rebuilt only where it is read: with the distributed optimizer each replica rebuilds the rows of its own
shard. In a bf16 bucket P and Q travel in bf16; what that rounds away goes into the residual (docs/how-it-works.md). So
does what blocks of int8 leave out of them (`--low-rank-wire int8`): their sum is then a `BlockReducer`'s.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.low_rank import LowRank, effective_rank, pays
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.metrics.traffic import all_reduce_bytes
from optimus_cc_ext.techniques.block_reducer import BlockCodecs, BlockReducer, ExchangePlan
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.collective import PendingCollective, start_sum
from optimus_cc_ext.techniques.factor_state import FactorStates
from optimus_cc_ext.techniques.reducer import DenseReducer, Reducer, contiguous_runs
from optimus_cc_ext.techniques.shape_group import ShapeGroup, copy_if_cast
from optimus_cc_ext.techniques.strided import progressions

__all__ = ["BucketReducer", "reduced_bytes", "worth_compressing"]

PACKED_UP_TO_BYTES = 1 << 20
"""Dense runs of a bucket up to this size travel with P in one collective; longer ones are reduced in place."""

PACK_AT_LEAST_BYTES = 256 << 10
"""What a collective has to carry to be worth its latency; P and Q of a small model travel in one each."""

MOST_PACKS = 4
"""Into how many collectives per phase the matrices are cut at most, so that the next ones are projected meanwhile."""


def worth_compressing(gradient: torch.Tensor, compression_rank: int, force: bool) -> bool:
    """Whether a gradient is a matrix on which the factorisation saves anything."""
    if gradient.dim() < 2:
        return False
    rows = gradient.shape[0]
    return force or pays(rows, gradient.numel() // rows, compression_rank)


def reduced_bytes(
    matrices: Sequence[torch.Tensor],
    dense: Sequence[torch.Tensor],
    compression_rank: int,
    ranks: int,
    codec: Codec | None = None,
) -> int:
    """Bytes that a `BucketReducer` of these gradients sends, before there is one: all P, all Q, and what is dense.

    With a codec, as if all P travelled in one message, and all Q: packs fill up some more blocks.
    """
    wire = torch.bfloat16 if matrices[0].dtype == torch.bfloat16 else torch.float32
    values: tuple[list[int], list[int]] = ([], [])
    for matrix in matrices:
        rows, columns = matrix.shape[0], matrix.numel() // matrix.shape[0]
        r = effective_rank(rows, columns, compression_rank)
        values[0].append(rows * r)
        values[1].append(columns * r)
    nbytes = sum(gradient.nbytes for gradient in dense)
    if codec is None:
        return all_reduce_bytes(nbytes + wire.itemsize * sum(map(sum, values)), ranks)
    codecs, sent = BlockCodecs(codec, codec), all_reduce_bytes(nbytes, ranks)
    for sizes in values:
        ranges = [(end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        sent += ExchangePlan(sum(sizes), ranges, [], wire, ranks, sharded=False, codecs=codecs).sent_bytes()
    return sent


@dataclass
class _Pack:
    """Matrices of some shapes, whose P travel in one collective, and whose Q in another."""

    groups: list[ShapeGroup]
    first: torch.Tensor
    """All P, and in the first pack the small dense runs, as they travel."""

    second: torch.Tensor
    """All Q."""

    sum_of_p: Reducer
    """Of `first`, in place."""

    sum_of_q: Reducer

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes


class BucketReducer:
    """See above, and `Reducer`.

    Args:
        matrices: views into the bucket, each of two dimensions or more, fp32 or bf16; they are compressed.
        dense: flat views into the bucket; they are summed as they are.
        norm_groups: the gradient-norm group of each of `matrices`; None: all are of the main one.
        shard: the flat view into the bucket that this replica's optimizer reads; None: all of it.
        group: the bucket's data-parallel group.
        salt: tells this bucket's random start apart from others of the run; equal on all replicas, and on all
            tensor-parallel ranks, whose replicated parameters must stay equal.
        states, name: where residuals and warm starts are kept, by names that begin with this one.
        state_dtype: what they are kept in, fp32 or bf16.
        gauge: measures what compression leaves out and costs.
        wire: encodes P and Q; None: they travel as they are.
        scratch: memory for intermediate results, that several reducers on one stream can share.
    """

    def __init__(
        self,
        matrices: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        *,
        norm_groups: Sequence[str] | None = None,
        shard: torch.Tensor | None = None,
        group: dist.ProcessGroup,
        compressor: LowRank,
        config: DataParallelCompressionConfig,
        seed: int,
        salt: str,
        states: FactorStates | None = None,
        name: str = "bucket 0",
        state_dtype: torch.dtype = torch.float32,
        scratch: Scratch | None = None,
        gauge: Gauge | None = None,
        wire: Codec | None = None,
    ) -> None:
        self._scratch, self._codec = scratch or Scratch(), wire
        self._gauge = gauge or Gauge(self._scratch)
        self._group, self._compressor, self._config = group, compressor, config
        # Apart by gradient-norm group, too: what clipping shrinks together is remembered together.
        alike: dict[tuple[int, int, str], list[torch.Tensor]] = defaultdict(list)
        for matrix, norm_group in zip(matrices, norm_groups or [MAIN_NORM_GROUP] * len(matrices), strict=True):
            flat = matrix.view(matrix.shape[0], -1)
            alike[flat.shape[0], flat.shape[1], norm_group].append(flat)
        self.states = states or FactorStates(config.dp_compression_rank)
        self.states.make_warm_starts(compressor, self._scratch)
        self._groups = []
        for (rows, columns, norm_group), views in alike.items():
            shape = f"{rows}x{columns}"
            apart = "" if norm_group == MAIN_NORM_GROUP else f" {norm_group}"
            same = ShapeGroup(
                views, shard, config, norm_group=norm_group, states=self.states, name=f"{name}: {shape}{apart}",
                seed=seed, salt=f"{salt}/{shape}", state_dtype=state_dtype,
            )  # fmt: skip
            self._groups.append(same)
        runs = contiguous_runs(dense)
        self._in_place = [run for run in runs if run.nbytes > PACKED_UP_TO_BYTES or not self._groups]
        packed = [run for run in runs if run.nbytes <= PACKED_UP_TO_BYTES and self._groups]
        self._dense = _equally_far_apart(packed)
        self._matrices, self.encoded = sum(same.count for same in self._groups), 0
        self._packs = self._allocate_wire(matrices[0]) if self._groups else []
        self._whole = False
        self._outstanding: Sequence[_Pack] = ()  # whose P are being summed
        self._dense_sums: list[PendingCollective] = []

    def reduce(self, whole: bool = False) -> None:
        """Replace the views of the bucket by their sums over the group; nothing is left outstanding."""
        self.start(whole)
        self.finish()

    @torch.no_grad()
    def start(self, whole: bool = False) -> None:
        """See `Reducer`. With a shard, matrices outside of it keep what they held, unless they are wanted `whole`."""
        self._whole, self._outstanding = whole, self._packs
        self.encoded += self._matrices
        for dense in self._dense:
            dense.put()
        for pack in self._packs:
            with self._gauge.timed(pack.first.device):
                for same in pack.groups:
                    same.project(self._compressor, self._scratch)
                    copy_if_cast(same.p, same.p_wire)
            pack.sum_of_p.start()
        # Behind P, which is waited for first: they travel while Q is computed.
        self._dense_sums = [start_sum(run, self._group, "dense gradient reduction") for run in self._in_place]

    @torch.no_grad()
    def second_phase(self) -> None:
        """See `Reducer`: wait for each P and start the sum of the Q that follows from it."""
        packs, self._outstanding = self._outstanding, ()
        for pack in packs:
            pack.sum_of_p.finish()
            with self._gauge.timed(pack.first.device):
                for same in pack.groups:
                    same.state.note_finite(same.p_wire, self._scratch)
                # All shapes at once: on a GPU a factorisation takes as long as many.
                self._compressor.orthogonalize_all([s.p_wire for s in pack.groups], [s.p for s in pack.groups])
                for same in pack.groups:
                    matrices = same.matrices(self._scratch)
                    self._compressor.back_project(matrices, same.p, out=same.q)
                    self._gauge.note_projection(matrices, same.q)
                    copy_if_cast(same.q, same.q_wire)
            pack.sum_of_q.start()

    @torch.no_grad()
    def finish(self) -> None:
        """See `Reducer`."""
        self.second_phase()
        for pack in self._packs:
            pack.sum_of_q.finish()
            with self._gauge.timed(pack.second.device):
                for same in pack.groups:
                    same.rebuild(self._compressor, self._group.size(), self._scratch, self._whole)
        for dense in self._dense:
            dense.take()
        for dense_sum in self._dense_sums:
            dense_sum.wait()
        self._dense_sums = []

    @property
    def nbytes(self) -> int:
        """See `Reducer`."""
        return sum(pack.nbytes + pack.sum_of_p.nbytes + pack.sum_of_q.nbytes for pack in self._packs)

    def sent_bytes(self, whole: bool = False) -> int:
        """See `Reducer`. What is summed is the same for a shard and for all."""
        dense, ranks = sum(run.nbytes for run in self._in_place), self._group.size()
        if self._codec is None:
            return all_reduce_bytes(sum(pack.nbytes for pack in self._packs) + dense, ranks)
        sums = (each.sent_bytes() for pack in self._packs for each in (pack.sum_of_p, pack.sum_of_q))
        return sum(sums) + all_reduce_bytes(dense, ranks)

    @property
    def matrices(self) -> int:
        """How many matrices are compressed."""
        return self._matrices

    def _allocate_wire(self, like: torch.Tensor) -> list[_Pack]:
        """Two flat buffers per pack: its P (in the first pack also the small dense runs), and its Q."""
        dtype = torch.bfloat16 if like.dtype == torch.bfloat16 else torch.float32
        packs: list[_Pack] = []
        for groups in _packs(self._groups, dtype.itemsize):
            dense = [] if packs else self._dense
            p_sizes = [same.p_shape.numel() for same in groups]
            q_sizes = [same.q_shape.numel() for same in groups]
            dense_sizes = [runs.numel for runs in dense]
            first = torch.empty(sum(p_sizes) + sum(dense_sizes), dtype=dtype, device=like.device)
            second = torch.empty(sum(q_sizes), dtype=dtype, device=like.device)
            slots = first.split([*p_sizes, *dense_sizes])
            for same, p, q in zip(groups, slots[: len(groups)], second.split(q_sizes), strict=True):
                same.use_wire(p.view(same.p_shape), q.view(same.q_shape))
            for runs, slot in zip(dense, slots[len(groups) :], strict=True):
                runs.use_wire(slot)
            sum_of_p = self._sum_of(first, [same.p_wire for same in groups], slots[len(groups) :], "P")
            sum_of_q = self._sum_of(second, [same.q_wire for same in groups], [], "Q")
            packs.append(_Pack(groups, first, second, sum_of_p, sum_of_q))
        return packs

    def _sum_of(
        self, flat: torch.Tensor, factors: Sequence[torch.Tensor], dense: Sequence[torch.Tensor], name: str
    ) -> Reducer:
        if self._codec is None:
            purpose = f"compressed gradient reduction ({name})"
            return DenseReducer(flat, [flat], sharded=False, group=self._group, purpose=purpose)
        # Of a matrix each: tensor-parallel ranks may replicate one, and not another.
        matrices, codecs = [matrix for batch in factors for matrix in batch], BlockCodecs(self._codec, self._codec)
        return BlockReducer(flat, matrices, dense, sharded=False, group=self._group, codecs=codecs)


class _DenseRuns:
    """Equally long dense runs of a bucket at equal distances, and their place in a message."""

    def __init__(self, runs: torch.Tensor) -> None:
        self._runs = runs
        self.numel = runs.numel()

    def use_wire(self, slot: torch.Tensor) -> None:
        self._slot = slot.view(self._runs.shape)

    def put(self) -> None:
        self._slot.copy_(self._runs)

    def take(self) -> None:
        self._runs.copy_(self._slot)


def _packs(groups: list[ShapeGroup], itemsize: int) -> list[list[ShapeGroup]]:
    """Neighbours together, until a pack's two messages are large enough on average, and `MOST_PACKS` suffice.

    Args:
        itemsize: bytes of a value on the wire.
    """
    sizes = [(same.p_shape.numel() + same.q_shape.numel()) * itemsize for same in groups]
    least = max(2 * PACK_AT_LEAST_BYTES, -(-sum(sizes) // MOST_PACKS))
    packs: list[list[ShapeGroup]] = []
    room = 0
    for index, (same, size) in enumerate(zip(groups, sizes, strict=True)):
        # What is left for a pack of its own has to be worth one.
        if not packs or (room >= least and sum(sizes[index:]) >= least):
            packs.append([])
            room = 0
        packs[-1].append(same)
        room += size
    return packs


def _equally_far_apart(runs: Sequence[torch.Tensor]) -> list[_DenseRuns]:
    by_length: dict[int, list[torch.Tensor]] = defaultdict(list)
    for run in runs:
        by_length[run.numel()].append(run)
    return [
        _DenseRuns(progression.batch(equal[0], (length,)))
        for length, equal in by_length.items()
        for progression in progressions(int(run.storage_offset()) for run in equal)
    ]
