"""Products of fp32 matrices on a CPU: by oneDNN where it is faster, by what torch calls everywhere else.

torch gives fp32 products on a CPU to MKL, which keeps to 256-bit instructions on processors that are not Intel's;
oneDNN, which torch brings along, generates code for what the processor has. On a Zen 5 it multiplies fp32 at
400 GFLOP/s where MKL does 195 (two cores).

torch asks oneDNN where `torch.backends.mkldnn.matmul.fp32_precision` permits it to round to bf16. oneDNN makes use of
that permission on processors with AMX only, which are Intel's, where MKL uses all there is: there it is withheld. On
all others the products are of fp32 as before. Which of the two computes a product depends on shape, dtype, device and
processor, never on a measurement: both ends of a link and all replicas take the same one.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

__all__ = ["add_product", "in_row_blocks", "multiply", "onednn", "onednn_multiplies"]

_FEWEST_FLOPS = 1 << 24
"""Of one matrix's product: below, oneDNN's longer way to its first operation costs more than it saves."""

_BLOCK_VALUES = 1 << 22
"""Of a gradient-sized fp32 block, 16 MB: small enough to be still in a last-level cache when it is read again, large
enough that a call's fixed cost does not show."""


@cache
def _onednn_is_there() -> bool:
    # torch asks it on a processor with AVX-512 alone. One that cannot be asked for its capabilities may have AMX.
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.backends.mkldnn, "matmul")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.cpu.get_capabilities().get("amx_tile") is False
    )


def onednn_multiplies(like: Tensor, flops: int, fewest: int = _FEWEST_FLOPS) -> bool:
    """Whether products of `flops` operations per matrix, on the device of `like`, go to oneDNN."""
    return like.device.type == "cpu" and flops >= fewest and _onednn_is_there()


@contextmanager
def onednn() -> Iterator[None]:
    """fp32 products of batches in here, by `torch.bmm` or `baddbmm_`, go to oneDNN; only where it `onednn_multiplies`.

    A setting of the process, not of the thread: what another thread multiplies meanwhile is multiplied in fp32, too.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a module that replaces itself
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = A B for a batch, all of one dtype, fp32 or fp64: (B, n, k), (B, k, m) -> (B, n, m).

    A and B may be transposed or strided views; `out` is neither of them.
    """
    with _where_faster(a, b):
        return torch.bmm(a, b, out=out)


def add_product(a: Tensor, b: Tensor, into: Tensor, scale: float = 1.0) -> None:
    """into += scale A B for a batch, as in `multiply`: (B, n, k), (B, k, m), (B, n, m).

    oneDNN adds a product when it is complete: into + (-A) B has the bits of into - A B.
    """
    with _where_faster(a, b):
        into.baddbmm_(a, b, alpha=scale)


def _where_faster(a: Tensor, b: Tensor) -> AbstractContextManager[None]:
    faster = a.dtype == torch.float32 and onednn_multiplies(a, 2 * a.shape[1] * a.shape[2] * b.shape[2])
    return onednn() if faster else nullcontext()


def in_row_blocks(batch: int, n: int, m: int) -> Iterator[tuple[slice, slice]]:
    """(matrix, rows) after each other, so that a block of a (batch, n, m) tensor stays in the cache."""
    blocks = max(1, round(n * m / _BLOCK_VALUES))
    rows = -(-n // blocks)
    for index in range(batch):
        for first in range(0, n, rows):
            yield slice(index, index + 1), slice(first, min(n, first + rows))
