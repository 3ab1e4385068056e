"""The message of one compressed matrix: P and Q behind each other in one flat buffer."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from optimus_cc_ext.compressors.policy import packed_numel

__all__ = ["PackedFactors"]


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """The layout [P | Q], row by row. Both ends of a link build it from the same four numbers.

    Raises:
        ValueError: for sizes that are not positive, r > min(n, m), or another dtype than fp32, bf16 and fp16.
    """

    n: int
    """Rows of the matrix, and of P."""

    m: int
    """Columns of the matrix, rows of Q."""

    r: int
    """Columns of P and of Q."""

    dtype: torch.dtype
    """What travels: torch.float32, torch.bfloat16 or torch.float16."""

    def __post_init__(self) -> None:
        if not 1 <= self.r <= min(self.n, self.m):
            raise ValueError(f"a {self.n} x {self.m} matrix has no factors of rank {self.r}: use policy.effective_rank")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"factors travel in float32, bfloat16 or float16, got {self.dtype}")

    @property
    def numel(self) -> int:
        """Values in one message."""
        return packed_numel(self.n, self.m, self.r)

    @property
    def scale(self) -> float:
        """What P is multiplied by, and Q divided by, before they are rounded to the wire's dtype; a power of two.

        P has orthonormal columns, so an entry of Q = M^T P reaches sqrt(n) times M's largest: in fp16 it would
        overflow where M does not, and P's entries of 1/sqrt(n) would lose bits to subnormals. Scaled by c with
        2 sqrt(n) <= c < 4 sqrt(n), |Q / c| <= max |M| / 2 and |P c| < 4 sqrt(n), which fp16 holds for n < 2^28.
        """
        if self.dtype != torch.float16:
            return 1.0
        return 2.0 ** (1 + math.ceil(math.log2(self.n) / 2))

    def split(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """P (n, r) and Q (m, r) as views of `buffer`.

        Raises:
            ValueError: if the buffer is not a flat contiguous message of this size and dtype.
        """
        if buffer.shape != (self.numel,) or buffer.dtype != self.dtype or not buffer.is_contiguous():
            raise ValueError(
                f"expected a contiguous message of {self.numel} values of {self.dtype}, "
                f"got shape {tuple(buffer.shape)} of {buffer.dtype}: do both ends agree on matrix and rank?"
            )
        p, q = buffer.split([self.n * self.r, self.m * self.r])
        return p.view(self.n, self.r), q.view(self.m, self.r)
