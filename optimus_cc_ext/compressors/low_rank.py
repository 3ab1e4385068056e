"""One step of subspace iteration on equally shaped matrices: what CB sends and what SC all-reduces.

    P  = M Q                 project          (SC: all-reduce P)
    P  = orth(P)             orthogonalize
    Q' = M^T P               back_project     (SC: all-reduce Q')
    M ~= P Q'^T              reconstruct

PowerSGD (Vogels et al. 2019, algorithm 1); Optimus-CC uses it for both directions of traffic.
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from optimus_cc_ext.compressors import few_columns
from optimus_cc_ext.compressors.gradless import gradless
from optimus_cc_ext.compressors.orthogonalize import cholesky_qr, cholesky_qr_into
from optimus_cc_ext.compressors.orthogonalize_fp32 import DONE
from optimus_cc_ext.compressors.products import (
    add_product,
    adds_when_complete,
    column_blocks,
    in_row_blocks,
    is_faster_turned,
    is_large,
    multiply,
    onednn,
)
from optimus_cc_ext.compressors.scratch import Scratch

__all__ = ["FastLowRank", "LowRank"]


class LowRank(Protocol):
    """The four phases. B matrices of n x m at rank r, r <= min(n, m) (`policy.effective_rank`).

    Inputs may be bf16, fp16, fp32 or fp64, mixed; the result is fp32, or fp64 where an input is.
    `out` has the result's shape and may have another dtype, to which the result is then rounded; `orthogonalize`
    also writes over its input. Nothing is differentiated: `out` may require grad (Megatron's receive buffers do),
    no graph is recorded. A NaN or Inf in a matrix reaches that matrix's results as NaN or Inf: never an exception,
    never all finite.
    """

    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        """P = M Q: (B, n, m), (B, m, r) -> (B, n, r)."""
        ...

    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        """An orthonormal basis of P's columns: (B, n, r) -> (B, n, r). ValueError where n < r."""
        ...

    def orthogonalize_into(self, p: Tensor, out: Tensor) -> bool:
        """As `orthogonalize`; whether it is known, without asking a device, that no column is zero or NaN."""
        ...

    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        """Q' = M^T P: (B, n, m), (B, n, r) -> (B, m, r)."""
        ...

    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        """P Q^T: (B, n, r), (B, m, r) -> (B, n, m). Equal factors give equal bits, on both ends of a link."""
        ...

    def deflate(self, matrices: Tensor, p: Tensor, q: Tensor, share: float) -> None:
        """M -= share * P Q^T, in place, all of one dtype, fp32 or fp64: what the factors leave out."""
        ...

    def project_sum(self, matrices: Tensor, residual: Tensor | None, q: Tensor, *, total: Tensor, out: Tensor) -> None:
        """T = M + E and P = T Q, with T read and written once.

        Args:
            matrices: M (B, n, m), fp32, bf16 or fp16; may be a strided view of a bucket, with contiguous rows.
            residual: E (B, n, m), fp32 or bf16; None: nothing is added.
            q: (B, m, r).
            total: T (B, n, m), fp32, contiguous; may be `residual` itself.
            out: P (B, n, r).
        """
        ...

    def factorize_sum(
        self,
        matrices: Tensor,
        residual: Tensor | None,
        q: Tensor,
        *,
        total: Tensor,
        p: Tensor,
        new_q: Tensor,
        scale: float = 1.0,
    ) -> None:
        """T = M + E; P = c times an orthonormal basis of T Q, rounded to the dtype of `p`; Q' = T^T P of that P.

        Args:
            matrices, residual, q, total: as of `project_sum`.
            p: P (B, n, r), fp32, bf16 or fp16.
            new_q: Q' (B, m, r), fp32.
            scale: c.
        """
        ...

    def subtract_reconstruction(self, total: Tensor, p: Tensor, q: Tensor) -> None:
        """T -= R in place, (B, n, m), fp32, where R is what the other end of a link makes of P and Q.

        P and Q are as they travel, of one dtype; R is bit for bit what `reconstruct` gives in an `out` of that
        dtype. What is remembered is what was sent.
        """
        ...


class FastLowRank:
    """The version that training uses: one batched product per phase, `cholesky_qr` in between.

    It remembers nothing, but keeps the memory of its intermediate results: where `out` is given, a second call on
    the same shapes and dtypes allocates nothing but, on a CPU, r x r matrices (`orthogonalize_fp32`), and with AVX2
    alone a P of few columns, which oneDNN's linear layer returns (`products`). Large fp32 matrices with factors of few
    columns go through kernels of our own where those can be compiled (`few_columns`). Sums with, and differences from,
    other large matrices on a CPU are taken in blocks of rows that stay in the cache; on a GPU the number of operations
    depends neither on how many matrices there are nor on their size.
    Calls must be ordered on one stream.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._take_on_cpu = partial(self._scratch.take, device=torch.device("cpu"))

    @gradless
    def project(self, matrices: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        return self._times_factor(matrices, q, out)

    def orthogonalize(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        return cholesky_qr(p, out, self._scratch)

    @gradless
    def orthogonalize_into(self, p: Tensor, out: Tensor) -> bool:
        return cholesky_qr_into(p, out, self._scratch)[1]

    @gradless
    def back_project(self, matrices: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
        return self._times_factor(matrices.mT, p, out)

    @gradless
    def reconstruct(self, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
        p, q = self._factors(p, q)
        if out is None:
            out = p.new_empty(p.shape[0], p.shape[1], q.shape[1])
        if not _in_blocks(p, q):
            return self._product(p, q.mT, out)
        with onednn():
            for right, block, left in in_row_blocks(q, out, p):
                self._rebuild(left, right, block)
        return out

    @gradless
    def deflate(self, matrices: Tensor, p: Tensor, q: Tensor, share: float) -> None:
        add_product(p, q.mT, matrices, scale=-share)

    @gradless
    def project_sum(self, matrices: Tensor, residual: Tensor | None, q: Tensor, *, total: Tensor, out: Tensor) -> None:
        _, n, m = total.shape
        if not is_large(total, 2 * n * m * q.shape[-1]):
            _write_sum(total, matrices, residual)
            self._times_factor(total, q, out)
            return
        q = self._widened("right", q, torch.float32)
        product = out if out.dtype == torch.float32 else self._scratch.take("wide", out.shape, torch.float32, q.device)
        summands = (matrices,) if residual is None else (matrices, residual)
        for right, block, left, *added in in_row_blocks(q, total, product, *summands):
            _write_sum(block, *added)
            multiply(block, right, left)
        if product is not out:
            out.copy_(product)

    @gradless
    def factorize_sum(
        self,
        matrices: Tensor,
        residual: Tensor | None,
        q: Tensor,
        *,
        total: Tensor,
        p: Tensor,
        new_q: Tensor,
        scale: float = 1.0,
    ) -> None:
        _, n, m = total.shape
        r, as_it_is = q.shape[-1], p.dtype == torch.float32 and scale == 1.0
        basis = p if as_it_is else self._scratch.take("basis of a sum", p.shape, torch.float32, p.device)
        at_once = as_it_is and is_large(total, 2 * n * m * r) and few_columns.is_for_factors(r)
        if at_once and few_columns.takes(matrices, residual, q, total, p, new_q):
            done = few_columns.factorize(
                matrices, residual, q, total=total, p=p, new_q=new_q, enough=DONE, take=self._take_on_cpu
            )
            if done:
                return
        else:
            self.project_sum(matrices, residual, q, total=total, out=basis)
        self.orthogonalize(basis, out=basis)
        if not as_it_is:
            torch.mul(basis, scale, out=p)
        self.back_project(total, p, out=new_q)

    @gradless
    def subtract_reconstruction(self, total: Tensor, p: Tensor, q: Tensor) -> None:
        wire = p.dtype
        p, q = self._factors(p, q)
        if not _in_blocks(p, q):
            total.sub_(self._product(p, q.mT, self._scratch.take("arrives", total.shape, wire, total.device)))
            return
        unrounded = wire == p.dtype and total.is_contiguous()
        # The blocks of `reconstruct`, made by the same calls: so they have its bits.
        with onednn():
            for right, block, left in in_row_blocks(q, total, p):
                if not (unrounded and self._subtract_at_once(block, left, right)):
                    arrives = self._scratch.take("arrives", block.shape, wire, total.device)
                    block.sub_(self._rebuild(left, right, arrives))

    def _subtract_at_once(self, block: Tensor, p: Tensor, q: Tensor) -> bool:
        """block -= P Q^T, in `onednn`, if that has the bits of what `_rebuild` makes, subtracted; whether it has."""
        (_, n, m), r = block.shape, p.shape[2]
        compiled = few_columns.is_for_factors(r) and few_columns.takes(block, p, q)
        if compiled and few_columns.rebuilds_like_the_library(n, r, m):
            few_columns.subtract(block, p, q, self._take_on_cpu)
            return True
        if adds_when_complete(n, r, m):
            block.baddbmm_(p, q.mT, alpha=-1.0)
            return True
        return False

    def _rebuild(self, p: Tensor, q: Tensor, out: Tensor) -> Tensor:
        """A block of P Q^T in the dtype of `out`, as `multiply` makes it in `onednn`."""
        if out.dtype == p.dtype:
            return torch.bmm(p, q.mT, out=out)
        return out.copy_(torch.bmm(p, q.mT, out=self._scratch.take("wide", out.shape, p.dtype, p.device)))

    def _times_factor(self, matrices: Tensor, factor: Tensor, out: Tensor | None) -> Tensor:
        """A B for matrices A (B, n, k), which may be transposed, and a factor of each, (B, k, r)."""
        if not is_faster_turned(matrices, factor):
            return self._product(matrices, factor, out)
        (batch, n, k), r = matrices.shape, factor.shape[2]
        dtype = torch.promote_types(torch.promote_types(matrices.dtype, factor.dtype), torch.float32)
        blocks = column_blocks(n) if is_large(matrices, 2 * n * k * r) else 1
        turned = self._scratch.take("turned", (batch, blocks, r, n // blocks), dtype, matrices.device)
        if blocks == 1:
            self._product(factor.mT, matrices.mT, turned.view(batch, r, n))
        else:
            left, right = self._widened("left", factor, dtype).mT, self._widened("right", matrices.mT, dtype)
            columns = right.unflatten(2, (blocks, -1)).transpose(1, 2)  # (B, blocks, k, n / blocks)
            for product, one, parts in zip(turned, left, columns, strict=True):
                torch.bmm(one.expand(blocks, r, k), parts, out=product)
        out = matrices.new_empty(batch, n, r, dtype=dtype) if out is None else out
        out.unflatten(1, (blocks, -1)).copy_(turned.mT)
        return out

    def _product(self, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = self._widened("left", a, dtype), self._widened("right", b, dtype)
        if out is None:
            out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
        if out.dtype == dtype:
            return multiply(a, b, out)
        return out.copy_(multiply(a, b, self._scratch.take("wide", out.shape, dtype, out.device)))

    def _factors(self, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """P and Q, contiguous and of one dtype, fp32 or fp64."""
        dtype = torch.promote_types(torch.promote_types(p.dtype, q.dtype), torch.float32)
        return self._widened("left", p, dtype, contiguous=True), self._widened("right", q, dtype, contiguous=True)

    def _widened(self, side: str, t: Tensor, dtype: torch.dtype, contiguous: bool = False) -> Tensor:
        if t.dtype == dtype and (t.is_contiguous() or not contiguous):
            return t
        return self._scratch.take(side, t.shape, dtype, t.device).copy_(t)


def _write_sum(total: Tensor, matrices: Tensor, residual: Tensor | None = None) -> None:
    """total = matrices + residual in fp32, whatever their dtypes; `total` may be `residual`."""
    if residual is None:
        total.copy_(matrices)
    elif torch.float32 in (matrices.dtype, residual.dtype):
        torch.add(matrices, residual, out=total)
    else:
        # Two 16-bit tensors would be added in 16 bits.
        total.copy_(matrices).add_(residual)


def _in_blocks(p: Tensor, q: Tensor) -> bool:
    """Whether P Q^T is made block by block."""
    return p.dtype == q.dtype == torch.float32 and is_large(p, 2 * p.shape[1] * q.shape[1] * p.shape[2])
