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


class onednn:
    """fp32 products of batches in here, by `torch.bmm` or `baddbmm_`, go to oneDNN; only where it `onednn_multiplies`.

    A setting of the process, not of the thread: what another thread multiplies meanwhile is multiplied in fp32, too.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a module that replaces itself
        self._before = settings.fp32_precision
        settings.fp32_precision = "bf16"

    def __exit__(self, *_: object) -> None:
        torch.backends.mkldnn.matmul.fp32_precision = self._before  # type: ignore[attr-defined]


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = A B for a batch, all of one dtype, fp32 or fp64: (B, n, k), (B, k, m) -> (B, n, m).

    A and B may be transposed or strided views; `out` is neither of them.
    """
    if not _faster(a, b):
        return torch.bmm(a, b, out=out)
    with onednn():
        return torch.bmm(a, b, out=out)


def add_product(a: Tensor, b: Tensor, into: Tensor, scale: float) -> None:
    """into += scale A B for a batch, as in `multiply`: (B, n, k), (B, k, m), (B, n, m).

    oneDNN adds a product when it is complete: with a scale of -1 this has the bits of into - A B.
    """
    if not _faster(a, b):
        into.baddbmm_(a, b, alpha=scale)
        return
    with onednn():
        into.baddbmm_(a, b, alpha=scale)


def _faster(a: Tensor, b: Tensor) -> bool:
    return a.dtype == torch.float32 and onednn_multiplies(a, 2 * a.shape[1] * a.shape[2] * b.shape[2])


def in_row_blocks(wide: Tensor, *tall: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For each block of rows, which stays in the cache: its matrix of `wide`, and the rows of each of `tall`.

    Args:
        wide: (B, m, r).
        tall: (B, n, ...) each; the first one, (B, n, m), has the blocks' size.
    """
    batch, n, m = tall[0].shape
    blocks = max(1, round(n * m / _BLOCK_VALUES))
    if batch == blocks == 1:
        yield wide, *tall  # a view costs as much as a small product
        return
    rows = -(-n // blocks)
    for index in range(batch):
        one = slice(index, index + 1)
        for first in range(0, n, rows):
            yield wide[one], *(t[one, first : first + rows] for t in tall)
