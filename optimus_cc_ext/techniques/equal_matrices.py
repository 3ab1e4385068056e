"""The matrices of one shape in a gradient bucket, as one batch, and what error feedback remembers about them.

Passes over memory of the matrices' size that one iteration takes beside the products with P and Q, each of which
reads or writes the batch once (fp32 bucket and state; in brackets those of a copy per matrix, as it was before):

    M = G + E               read, read, write            [5: copy, then add]
    E = M - G / D           read, read, write            [2, and a product; so it still is where a shard is rebuilt]
    the step counts         none on a CPU, 3 on a GPU    [3]
"""

from dataclasses import dataclass

import torch

from optimus_cc_ext.compressors import (
    LowRank,
    Scratch,
    effective_rank,
    initial_q,
    next_warm_start,
    private_generator,
)
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.stepped import SteppedTensor
from optimus_cc_ext.techniques.strided import progressions

__all__ = ["EqualMatrices"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of some matrices of the batch, and where they lie in the bucket."""

    gradients: torch.Tensor
    """(matrices, rows, columns), a strided view into the bucket."""

    matrices: slice
    rows: slice
    everything: bool
    """Whether it is the whole batch: then nothing needs to be cut out of it."""

    low: int
    high: int
    """Which elements of the rows, numbered flat, are asked for; only a part of one matrix asks for fewer than all."""

    def of(self, batch: torch.Tensor) -> torch.Tensor:
        """These matrices of (matrices, ...), whole."""
        return batch if self.everything else batch[self.matrices]

    def rows_of(self, batch: torch.Tensor) -> torch.Tensor:
        """These rows of (matrices, rows, ...)."""
        return batch if self.everything else batch[self.matrices, self.rows]

    def asked(self, rows: torch.Tensor) -> torch.Tensor:
        """What is asked for of a tensor like `gradients`."""
        return rows if self.high - self.low == rows.numel() else rows.view(-1)[self.low : self.high]


class EqualMatrices:
    """See above. The order of the batch is that of the bucket, progression by progression (`strided`).

    Args:
        views: (rows, columns) each, contiguous, in one storage.
        shard: the flat view into that storage that this replica's optimizer reads; None: all of it.
    """

    def __init__(
        self,
        views: list[torch.Tensor],
        shard: torch.Tensor | None,
        config: DataParallelCompressionConfig,
        seed: int,
        salt: str,
        state_dtype: torch.dtype,
    ) -> None:
        self._whole, self._own = _parts(views, shard)
        self._sharded = shard is not None
        self._feedback = config.dp_error_feedback
        self.count = len(views)
        rows, columns = views[0].shape
        rank = effective_rank(rows, columns, config.dp_compression_rank)
        device = views[0].device
        self.p_shape = torch.Size((self.count, rows, rank))
        self.q_shape = torch.Size((self.count, columns, rank))
        generator = private_generator(seed, "dp-compression", salt, device=device)
        self.fresh_directions = initial_q(self.count, columns, rank, generator=generator, device=device)
        self.warm_start = SteppedTensor(self.fresh_directions.to(state_dtype, copy=True))
        self.residual = SteppedTensor(torch.zeros(self.count, rows, columns, dtype=state_dtype, device=device))
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def use_wire(self, p_wire: torch.Tensor, q_wire: torch.Tensor) -> None:
        """Take the slots of P and Q in the messages; they are computed in fp32, in place where the wire is fp32."""
        self.p_wire, self.q_wire = p_wire, q_wire
        self.p, self.q = p_wire.float(), q_wire.float()

    @property
    def nbytes(self) -> int:
        """Bytes of residual and factors."""
        return self.residual.nbytes + self.warm_start.nbytes + self.fresh_directions.nbytes

    def gather(self, scratch: Scratch) -> torch.Tensor:
        """(matrices, rows, columns): the bucket's gradients as one batch, with the residual added.

        Without a residual to add, it is the bucket itself where that can be seen as one batch.
        """
        if not self._feedback and len(self._whole) == 1:
            return self._whole[0].gradients
        batch, residual = self.residual.workspace(scratch), self.residual.value
        for part in self._whole:
            _add(part.gradients, part.of(residual) if self._feedback else None, out=part.of(batch))
        return batch

    def project(self, compressor: LowRank, scratch: Scratch) -> None:
        """P of the bucket's gradients with the residual added: the sum is what `gathered` returns afterwards."""
        if not self._feedback and len(self._whole) == 1:
            compressor.project(self._whole[0].gradients, self.warm_start.value, out=self.p)
            return
        batch, residual, q = self.residual.workspace(scratch), self.residual.value, self.warm_start.value
        for part in self._whole:
            carried = part.of(residual) if self._feedback else None
            compressor.project_sum(part.gradients, carried, part.of(q), total=part.of(batch), out=part.of(self.p))

    def gathered(self, scratch: Scratch) -> torch.Tensor:
        """What `gather` returned before a collective: still there, or, where scratch memory held it, made again."""
        if self.residual.is_wide and (self._feedback or len(self._whole) > 1):
            return self.residual.workspace(scratch)
        return self.gather(scratch)

    def rebuild(self, compressor: LowRank, ranks: int, scratch: Scratch, whole: bool) -> None:
        """Write P Q^T into the bucket, where it is read, and remember what it lacks.

        Args:
            ranks: how many replicas the sum is of.
            whole: write all of it, also where this replica's optimizer reads a shard.
        """
        take_over(self.q_wire, self.q)
        everywhere = whole or not self._sharded
        lacking = None
        if self._feedback:
            lacking = self.gathered(scratch)  # before the bucket changes, which it may be made from again
            if not everywhere:
                compressor.subtract_reconstruction(lacking, self.p, self.q, share=1.0 / ranks)
        for part in self._whole if everywhere else self._own:
            exact = self._write(part, compressor, scratch)
            if lacking is None:
                continue
            if everywhere:
                # What is in the bucket is what all replicas apply: it needs no second product, and no account of
                # what rounding took.
                written = part.gradients if exact is None else exact.copy_(part.gradients)
                part.of(lacking).sub_(written, alpha=1.0 / ranks)
            elif exact is not None:
                # What was rounded away goes back to its only reader.
                lost = part.asked(exact.sub_(part.gradients))
                part.asked(part.rows_of(lacking)).add_(lost)
        if lacking is not None:
            self.residual.write(lacking)
        start = scratch.take("start", self.q_shape, torch.float32, self.p.device)
        next_warm_start(self.q, self.fresh_directions, compressor, out=start, scratch=scratch)
        self.warm_start.write(start)

    def _write(self, part: _Part, compressor: LowRank, scratch: Scratch) -> torch.Tensor | None:
        """Write a part of the reduced gradients into the bucket; in fp32 whole rows.

        Returns what they are before rounding to the bucket's dtype, in scratch memory, if it rounds.
        """
        p, q = part.rows_of(self.p), part.of(self.q)
        if part.gradients.dtype == p.dtype:
            compressor.reconstruct(p, q, out=part.gradients)
            return None
        exact = scratch.take("rebuilt", part.gradients.shape, torch.float32, p.device)
        compressor.reconstruct(p, q, out=exact)
        part.asked(part.gradients).copy_(part.asked(exact))
        return exact


def take_over(values: torch.Tensor, into: torch.Tensor) -> None:
    """Round, or take over what was rounded; nothing to do between tensors of one dtype, which hold the same already."""
    if values.dtype != into.dtype:
        into.copy_(values)


def _parts(views: list[torch.Tensor], shard: torch.Tensor | None) -> tuple[list[_Part], list[_Part]]:
    """The whole batch, and what of it lies in the shard: few parts each, however many matrices there are."""
    rows, columns = views[0].shape
    whole: list[_Part] = []
    own: list[_Part] = []
    first = 0
    for progression in progressions(int(view.storage_offset()) for view in views):
        gradients = progression.batch(views[0], (rows, columns))
        matrices = slice(first, first + progression.count)
        everything = progression.count == len(views)
        whole.append(_Part(gradients, matrices, slice(0, rows), everything, 0, gradients.numel()))
        if shard is not None:
            start = int(shard.storage_offset())
            for piece in progression.shared_with(start, start + shard.numel(), rows * columns):
                top, bottom = piece.low // columns, -(-piece.high // columns)
                cut = gradients[piece.index : piece.index + piece.count, top:bottom]
                of_batch = slice(first + piece.index, first + piece.index + piece.count)
                all_of_it = cut.shape == (len(views), rows, columns)
                low = piece.low - top * columns
                high = low + (piece.high - piece.low) * piece.count
                own.append(_Part(cut, of_batch, slice(top, bottom), all_of_it, low, high))
        first += progression.count
    return whole, own


def _add(gradients: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
    if residual is None:
        out.copy_(gradients)
    elif gradients.dtype == residual.dtype == out.dtype:
        torch.add(gradients, residual, out=out)
    else:
        # On a CPU a sum of two dtypes makes a copy of its own first.
        out.copy_(gradients).add_(residual)
