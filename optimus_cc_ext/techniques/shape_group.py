"""Matrices of one shape in a gradient bucket, as one batch of strided views, and their state.

One iteration makes these passes over memory of the matrices' size, beside the products with P and Q, each of which
reads or writes the batch once (fp32 bucket and state):

    M = G + E               read, read, write
    E = M - G / D           read, read, write; if only a shard of G is rebuilt, a product
    commit                  none on a CPU, 3 on a GPU
"""

from dataclasses import dataclass

import torch

from optimus_cc_ext.collectives.ranges import Range
from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.state import FactorState, FactorStates
from optimus_cc_ext.techniques.strided import Progression, progressions


@dataclass(frozen=True)
class EqualMatrices:
    """Matrices of one shape and one gradient-norm group, because clipping scales the residuals of a group together."""

    rows: int
    columns: int
    norm_group: str
    starts: tuple[int, ...]
    """Offsets of the matrices in the flat bucket, in the order of the bucket."""

    r: int
    """Number r of columns of the matrices' factors."""

    @property
    def name(self) -> str:
        """Name of the matrices' state in checkpoints."""
        apart = "" if self.norm_group == MAIN_NORM_GROUP else f" {self.norm_group}"
        return f"{self.rows}x{self.columns}{apart}"

    @property
    def p_numel(self) -> int:
        """Number of values of P, of all matrices."""
        return len(self.starts) * self.rows * self.r

    @property
    def q_numel(self) -> int:
        """Number of values of Q, of all matrices."""
        return len(self.starts) * self.columns * self.r


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of the batch: some rows of some matrices, and their place in the bucket."""

    where: Progression
    """Places of the part's first rows in the bucket, matrix by matrix."""

    shape: tuple[int, int]
    """Rows and columns of the part, of each matrix."""

    matrices: slice
    rows: slice
    everything: bool
    """True if the part is the whole batch, so that nothing has to be cut out of it."""

    low: int
    high: int
    """Flat range within these rows that the optimizer's shard covers. It is smaller than the rows only where a shard
    boundary cuts through a matrix.
    """

    def gradients(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part's gradients, (matrices, rows, columns), a strided view into the bucket `flat`."""
        return self.where.batch(flat, self.shape)

    def matrices_of(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the matrices of a batch (matrices, ...) in which this part lies, with all their rows."""
        return batch if self.everything else batch[self.matrices]

    def rows_of(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the rows of a batch (matrices, rows, ...) that this part covers."""
        return batch if self.everything else batch[self.matrices, self.rows]

    def asked(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of `rows`, a tensor like the part's gradients, that the optimizer's shard covers."""
        return rows if self.high - self.low == rows.numel() else rows.view(-1)[self.low : self.high]


class ShapeGroup:
    """Group of the matrices of one shape. The batch is in the order of the bucket, progression by progression
    (`strided`).

    Args:
        device: the device of the bucket.
        shard: the range of the bucket that this replica's optimizer reads; None: the whole bucket.
        states: the container of its state, by `name`.
        salt: makes its first Q different from others of the run.
    """

    def __init__(
        self,
        same: EqualMatrices,
        device: torch.device,
        shard: Range | None,
        config: DataParallelCompressionConfig,
        *,
        states: FactorStates,
        name: str,
        seed: int,
        salt: str,
        state_dtype: torch.dtype,
    ) -> None:
        self._whole, self._own = _parts(same, shard)
        self._flat: torch.Tensor | None = None
        self._gradients: list[torch.Tensor] = []
        """Between `project` and `rebuild`, the bucket, and the gradients of all parts, which are views into it."""

        self._sharded = shard is not None
        self._feedback = config.dp_error_feedback
        shape = (len(same.starts), same.rows, same.columns)

        def make() -> FactorState:
            generator = private_generator(seed, "dp-compression", salt, device=device)
            return FactorState(
                shape, config.dp_compression_rank, generator=generator, dtype=state_dtype, device=device,
                norm_group=same.norm_group,
            )  # fmt: skip

        self.state = states.get(name, make)
        self.q_shape = self.state.fallback.shape
        self.p_shape = torch.Size((*shape[:2], same.r))

    def use_wire(self, p_wire: torch.Tensor, q_wire: torch.Tensor) -> None:
        """Take the slots of P and Q in the messages. P and Q are computed in fp32, directly in the slots if these are
        fp32.
        """
        self.p_wire, self.q_wire = p_wire, q_wire
        self.p, self.q = p_wire.float(), q_wire.float()

    def project(self, flat: torch.Tensor, compressor: LowRank, scratch: Scratch) -> None:
        """Compute P = M Q with M = G + E, which `matrices` returns afterwards; G lies in the bucket `flat`."""
        self._flat, self._gradients = flat, [part.gradients(flat) for part in self._whole]
        q = self.state.warm_start.value
        if self._is_the_bucket:
            compressor.project(self._gradients[0], q, out=self.p)
            return
        total, residual = self.state.residual.workspace(scratch), self.state.residual.value
        for part, gradients in zip(self._whole, self._gradients, strict=True):
            carried = part.matrices_of(residual) if self._feedback else None
            compressor.project_sum(
                gradients,
                carried,
                part.matrices_of(q),
                total=part.matrices_of(total),
                out=part.matrices_of(self.p),
            )

    def matrices(self, scratch: Scratch) -> torch.Tensor:
        """Return M (matrices, rows, columns): kept since `project`, or computed again if scratch memory held it.

        Without a residual, M is the bucket itself if that can be viewed as one batch.
        """
        if self._is_the_bucket:
            return self._gradients[0]
        total, residual = self.state.residual.workspace(scratch), self.state.residual.value
        if not self.state.residual.is_wide:
            for part, gradients in zip(self._whole, self._gradients, strict=True):
                part.matrices_of(total).copy_(gradients)
                if self._feedback:
                    part.matrices_of(total).add_(part.matrices_of(residual))
        return total

    @property
    def _is_the_bucket(self) -> bool:
        return not self._feedback and len(self._whole) == 1

    def rebuild(self, compressor: LowRank, ranks: int, scratch: Scratch, whole: bool) -> None:
        """Write P Q^T into the part of the bucket that this rank's optimizer reads, and keep the error as the residual.

        Args:
            ranks: number of replicas in the sum.
            whole: write the whole batch, even if this replica's optimizer reads a shard.
        """
        copy_if_cast(self.q_wire, self.q)
        everywhere = whole or not self._sharded
        lacking = None
        if self._feedback:
            lacking = self.matrices(scratch)  # M may be computed from the bucket, which changes below
            if not everywhere:
                compressor.subtract_reconstruction(lacking, self.p, self.q, share=1.0 / ranks)
        for part, gradients in self._written(everywhere):
            exact = self._write(part, gradients, compressor, scratch)
            if lacking is None:
                continue
            if everywhere:
                # All replicas apply the values in the bucket, so the residual needs neither a second product nor a
                # separate account of rounding errors.
                written = gradients if exact is None else exact.copy_(gradients)
                part.matrices_of(lacking).sub_(written, alpha=1.0 / ranks)
            elif exact is not None:
                # The rounding error goes to the residual of the only replica that reads these values.
                lost = part.asked(exact.sub_(gradients))
                part.asked(part.rows_of(lacking)).add_(lost)
        if lacking is not None:
            self.state.residual.write(lacking)
        self.state.next_q = self.q
        self._flat, self._gradients = None, []

    def _written(self, everywhere: bool) -> list[tuple[_Part, torch.Tensor]]:
        """Return the parts that this rank's optimizer reads, or all parts, with their gradients."""
        if everywhere:
            return list(zip(self._whole, self._gradients, strict=True))
        assert self._flat is not None, "`project` comes before `rebuild`"
        return [(part, part.gradients(self._flat)) for part in self._own]

    def _write(
        self, part: _Part, gradients: torch.Tensor, compressor: LowRank, scratch: Scratch
    ) -> torch.Tensor | None:
        """Write a part of the reduced gradients into the bucket; whole rows if the bucket is fp32.

        Returns the values before rounding to the bucket's dtype, in scratch memory; None if they are not rounded.
        """
        p, q = part.rows_of(self.p), part.matrices_of(self.q)
        if gradients.dtype == p.dtype:
            compressor.reconstruct(p, q, out=gradients)
            return None
        exact = scratch.take("rebuilt", gradients.shape, torch.float32, p.device)
        compressor.reconstruct(p, q, out=exact)
        part.asked(gradients).copy_(part.asked(exact))
        return exact


def copy_if_cast(values: torch.Tensor, into: torch.Tensor) -> None:
    """Copy between tensors of different dtypes; tensors of one dtype are the same tensor here."""
    if values.dtype != into.dtype:
        into.copy_(values)


def _parts(same: EqualMatrices, shard: Range | None) -> tuple[list[_Part], list[_Part]]:
    """Return the parts of the whole batch, and those in the shard: a few each, however many matrices there are."""
    rows, columns, count = same.rows, same.columns, len(same.starts)
    start, length = shard or (0, 0)
    whole: list[_Part] = []
    own: list[_Part] = []
    first = 0
    for there in progressions(same.starts):
        matrices, numel = slice(first, first + there.count), there.count * rows * columns
        whole.append(_Part(there, (rows, columns), matrices, slice(0, rows), there.count == count, 0, numel))
        for piece in there.shared_with(start, start + length, rows * columns):
            top, bottom = piece.low // columns, -(-piece.high // columns)
            where = Progression(there.first + piece.index * there.stride + top * columns, there.stride, piece.count)
            matrices = slice(first + piece.index, first + piece.index + piece.count)
            all_of_it = (piece.count, top, bottom) == (count, 0, rows)
            low = piece.low - top * columns
            high = low + (piece.high - piece.low) * piece.count
            own.append(_Part(where, (bottom - top, columns), matrices, slice(top, bottom), all_of_it, low, high))
        first += there.count
    return whole, own
