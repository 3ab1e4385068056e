"""Large fp32 matrices and factors of few columns, on a CPU: by kernels of our own, where `llvm.is_there`.

Libraries give such products half of the processor's speed or less, and read the matrix once for each. Here it is

    T = M + E,  P = T Q,  S = T^T P          one pass over the matrix: read, read, write
    D = diag(P^T P)^-1/2,  D P^T P D = L L^T,  W = L^-1 D
    P <- P W^T,  S <- S W^T                  which is T^T P for the new P
    T <- T - P S^T                           read, write

What W amplifies of the rounding is known, as in `orthonormalize_fp32`, and decides whether this was enough. The kernels
are in `few_columns_kernels`.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from optimus_cc_ext.compressors import few_columns_kernels as kernels
from optimus_cc_ext.compressors.products import onednn

__all__ = ["factorize", "is_for_factors", "orthonormalize", "rebuilds_like_the_library", "subtract", "takes"]

Take = Callable[..., Tensor]
"""Scratch memory: (name, shape, dtype)."""


def is_for_factors(r: int) -> bool:
    """Whether there are kernels on this machine for fp32 factors of r columns."""
    return kernels.vector_width(r) > 0


def takes(matrices: Tensor, *others: Tensor | None) -> bool:
    """Whether M (1, n, m) and what belongs to it are of the kind that the functions here work on.

    That is fp32 on the CPU, contiguous (of M the rows), and m a multiple of 32.
    """
    if matrices.shape[0] != 1 or matrices.shape[2] % 32 or matrices.stride(2) != 1:
        return False
    if not (matrices.dtype == torch.float32 and matrices.is_cpu):
        return False
    for tensor in others:
        if tensor is not None and not (tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()):
            return False
    return True


def factorize(
    matrices: Tensor,
    residual: Tensor | None,
    q: Tensor,
    *,
    total: Tensor,
    p: Tensor,
    new_q: Tensor,
    enough: float,
    take: Take,
) -> bool:
    """T = M + E, P an orthonormal basis of the columns of T Q, and Q' = T^T P.

    For what it `takes`, and r that it `is_for_factors`.

    Args:
        matrices: M (1, n, m).
        residual: E (1, n, m) or None; may be `total`.
        q: (1, m, r).
        total: T (1, n, m).
        p: (1, n, r).
        new_q: Q' (1, m, r).
        enough: how much W may amplify a Gram matrix's error.
        take: scratch memory.

    Returns:
        Whether P is such a basis. If not, it is T Q, and Q' undefined.
    """
    _, n, m = total.shape
    r, threads = q.shape[2], torch.get_num_threads()
    multiply, rows = kernels.sum_and_products(m, r, residual is not None)
    product = take("product32", (-(-n // rows) * rows, r), torch.float32)
    parts = take("parts32", (threads, m, r), torch.float32)
    blocks = take("blocks32", (threads, 2, rows, kernels.line(m)), torch.float32)
    multiply(
        threads,
        matrices=matrices.data_ptr(), stride=matrices.stride(1), total=total.data_ptr(), q=q.data_ptr(), n=n,
        residual=total.data_ptr() if residual is None else residual.data_ptr(),
        product=product.data_ptr(), parts=parts.data_ptr(), count=threads, blocks=blocks.data_ptr(),
    )  # fmt: skip
    amplification = ctypes.c_double()
    kernels.both_turned(m, r)(
        threads,
        product=product.data_ptr(), n=n, p=p.data_ptr(), parts=parts.data_ptr(), count=threads,
        new_q=new_q.data_ptr(), amplification=ctypes.addressof(amplification),
    )  # fmt: skip
    if amplification.value <= enough:  # NaN is not
        return True
    p[0].copy_(product[:n])
    return False


def orthonormalize(p: Tensor, out: Tensor, *, worth: float) -> list[float]:
    """Turn the columns of each P (B, n, r), fp32 and contiguous, into an orthonormal basis; r that it `is_for_factors`.

    Args:
        out: where to write it; may be p.
        worth: how much W may amplify the Gram matrix's error; where it does more, `out` is P as it was.

    Returns:
        By how much each W amplifies it, or NaN.
    """
    batch, n, r = p.shape
    amplification = (ctypes.c_double * batch)()
    kernels.turned(r, worth)(
        min(torch.get_num_threads(), batch),
        p=p.data_ptr(), n=n, batch=batch, out=out.data_ptr(), amplification=ctypes.addressof(amplification),
    )  # fmt: skip
    return list(amplification)


def subtract(total: Tensor, p: Tensor, q: Tensor, take: Take) -> None:
    """T -= P Q^T in place, (1, n, m), (1, n, r), (1, m, r), for what it `takes` and r that it `is_for_factors`."""
    _, n, m = total.shape
    r, threads = p.shape[2], torch.get_num_threads()
    packed = take("packed32", (threads, m, r), torch.float32)
    kernels.subtracted(m, r)(
        threads, total=total.data_ptr(), n=n, p=p.data_ptr(), q=q.data_ptr(), packed=packed.data_ptr()
    )


@cache
def rebuilds_like_the_library(n: int, r: int, m: int) -> bool:
    """Whether `subtract` has the bits of P Q^T, as torch's library makes it, subtracted; asked once per shape.

    One term is added after the other, rounded once each, which is what libraries do with few terms.
    """
    # Whatever the process's default device and dtype are.
    draw = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float32)
    p, q, total = draw(1, n, r), draw(1, m, r), draw(1, n, m)
    with onednn():
        expected = total - torch.bmm(p, q.mT)
    subtract(total, p, q, lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device="cpu"))
    return torch.equal(total, expected)
