"""Products of fp32 matrices: by oneDNN where it is faster, by torch's batched product everywhere else.

On a CPU torch gives fp32 products to MKL, which keeps to 256-bit instructions on processors that are not Intel's;
oneDNN, which torch brings along for its layers, generates code for what the processor has. On a Zen 5 it multiplies
fp32 at 400 GFLOP/s where MKL does 195 (two cores). Which of them computes a product depends on shape, dtype, device and
on what this build of torch has, never on a measurement: both ends of a link and all replicas take the same one.

oneDNN's operators are reached as a linear layer (x W^T), as a 1 x 1 convolution that adds to its output in place, and
as that convolution's gradient (x^T y). A linear layer and a gradient return new tensors: they are used for results of
a factor's size only. Results as large as a gradient are written in place.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

__all__ = ["add_outer", "gram", "in_row_blocks", "linear", "multiply", "onednn_multiplies"]

_FEWEST_FLOPS = 1 << 24
"""Of one matrix's product: below, the calls per matrix cost more than oneDNN saves over one call per batch."""

_BLOCK_VALUES = 1 << 22
"""Of a gradient-sized fp32 block, 16 MB: small enough to be still in a last-level cache when it is read again, large
enough that a call's fixed cost does not show."""


@cache
def _onednn_is_there() -> bool:
    # The operators are torch's private ones; where one is missing or the processor is none that oneDNN generates
    # code for, MKL or OpenBLAS does everything.
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_convolution_pointwise_")
    )


def onednn_multiplies(like: Tensor, flops: int, fewest: int = _FEWEST_FLOPS) -> bool:
    """Whether products of `flops` operations per matrix, on the device of `like`, go to oneDNN."""
    return like.device.type == "cpu" and flops >= fewest and _onednn_is_there()


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = A B for a batch, all of one dtype, fp32 or fp64: (B, n, k), (B, k, m) -> (B, n, m).

    A may be transposed. One of n, k and m is a compression rank; where it is k, `add_outer` is the better choice.
    """
    flops = 2 * a.shape[1] * a.shape[2] * b.shape[2]
    by_rows, by_columns = a.stride(-1) == 1, a.stride(-2) == 1
    if a.dtype != torch.float32 or not (by_rows or by_columns) or not onednn_multiplies(a, flops):
        return torch.bmm(a, b, out=out)
    for a_i, b_i, out_i in zip(a, b, out, strict=True):
        # The wide matrix as it lies: as the rows to multiply, or as the weight, whose layout oneDNN is free in.
        out_i.copy_(linear(a_i, b_i.mT) if by_rows else linear(b_i.mT, a_i).mT)
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T by oneDNN, fp32: (n, k), (m, k) -> a new (n, m)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def add_outer(p: Tensor, q: Tensor, into: Tensor) -> None:
    """into += P Q^T by oneDNN: (n, r), (m, r), (n, m), fp32 and contiguous; nothing is allocated."""
    (n, r), m = p.shape, q.shape[0]
    # A 1 x 1 convolution over n pixels, channels last: from r channels to m.
    output, pixels = (t.view(1, n, 1, t.shape[1]).permute(0, 3, 1, 2) for t in (into, p))
    torch.ops.mkldnn._convolution_pointwise_.binary(
        output, pixels, q.view(m, r, 1, 1), None, [0, 0], [1, 1], [1, 1], 1, "add", 1.0, None, [], None
    )


def gram(a: Tensor, out: Tensor) -> None:
    """out = A^T A by oneDNN, (n, r) -> (r, r), fp32 and contiguous; it returns a new (r, r) tensor inside."""
    n, r = a.shape
    pixels = a.view(1, 1, n, r).permute(0, 3, 1, 2)
    # Of the weight only the shape is read: the gradient of a layer does not depend on it.
    gradients = torch.ops.aten.convolution_backward(
        pixels, pixels, out.view(r, r, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
    )
    out.copy_(gradients[1].view(r, r))


def in_row_blocks(batch: int, n: int, m: int) -> Iterator[tuple[int, slice]]:
    """(matrix, rows) after each other, so that a block of a (batch, n, m) tensor stays in the cache."""
    blocks = max(1, round(n * m / _BLOCK_VALUES))
    rows = -(-n // blocks)
    for index in range(batch):
        for first in range(0, n, rows):
            yield index, slice(first, min(n, first + rows))
