"""Products of fp32 matrices on a CPU: by oneDNN where it is faster, by what torch calls everywhere else.

torch gives fp32 products on a CPU to MKL, which keeps to 256-bit instructions on processors that are not Intel's;
oneDNN, which torch brings along, generates code for what the processor has. On a Zen 5 it multiplies fp32 at
400 GFLOP/s where MKL does 195 (two cores).

With AVX-512 torch asks oneDNN where `torch.backends.mkldnn.matmul.fp32_precision` permits it to round to bf16. oneDNN
makes use of that permission on processors with AMX only, which are Intel's, where MKL uses all there is: there it is
withheld. On all others the products are of fp32 as before.

With AVX2 alone torch never asks oneDNN for these, and as a rule MKL is as fast. But where a factor has few columns, M Q
is faster by oneDNN's linear layer, which is what TorchInductor calls, too, and M^T P is by far faster as (P^T M)^T,
many columns of M at a time.

The same holds for products that are not large, which are MKL's on all processors: M^T P is faster as (P^T M)^T, and
those of a batch with fewer than 16 columns are so, too, for M Q.

Which way a product goes depends on shape, dtype, device and processor, never on a measurement: both ends of a link and
all replicas take the same one.
"""

from collections.abc import Iterator
from functools import cache, partial

import torch
from torch import Tensor

__all__ = [
    "add_product",
    "adds_when_complete",
    "column_blocks",
    "in_row_blocks",
    "is_faster_turned",
    "is_large",
    "multiplies_fp32",
    "multiply",
    "onednn",
]

_FEWEST_FLOPS = 1 << 24
"""Of one matrix's product: below, a longer way to its first operation costs more than it saves."""

_FEW_COLUMNS = 32
"""Of a factor, up to which oneDNN's linear layer is the faster one with AVX2."""

_MKLS_COLUMNS = 16
"""Of a factor, below which MKL multiplies a batch of matrices by their factors several times slower than turned."""

_FEWEST_FLOPS_TO_TURN = 1 << 18
"""Of one matrix's product: below, turning the result costs what is saved."""

_BLOCK_VALUES = 1 << 22
"""Of a gradient-sized fp32 block, 16 MB: small enough to be still in a last-level cache when it is read again, large
enough that a call's fixed cost does not show."""

_COLUMNS_AT_ONCE = 192, 256, 128, 64
"""Of M in P^T M with AVX2, the first that divides them: all about equally fast."""


@cache
def _onednn_is_there() -> bool:
    # torch asks it on a processor with AVX-512 alone. One that cannot be asked for its capabilities may have AMX.
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.backends.mkldnn, "matmul")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.cpu.get_capabilities().get("amx_tile") is False
    )


@cache
def _linear_is_faster() -> bool:
    # Where it could round to bf16 there is more than AVX2.
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    )


def is_large(like: Tensor, flops: int, fewest: int = _FEWEST_FLOPS) -> bool:
    """Whether a product of `flops` operations per matrix, on the device of `like`, deserves a way of its own."""
    return like.device.type == "cpu" and flops >= fewest


def multiplies_fp32() -> bool:
    """Whether large products on this CPU are known to be of fp32, whatever the user permits torch to round to."""
    return _onednn_is_there() or _linear_is_faster()


class onednn:
    """fp32 products of batches in here, by `torch.bmm` or `baddbmm_`, go to oneDNN, if that is faster on this CPU.

    Only for products that are `is_large`. A setting of the process, not of the thread: what another thread multiplies
    meanwhile is multiplied in fp32, too.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = None
        if _onednn_is_there():
            settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a module that replaces itself
            self._before = settings.fp32_precision
            settings.fp32_precision = "bf16"

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            torch.backends.mkldnn.matmul.fp32_precision = self._before  # type: ignore[attr-defined]


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = A B for a batch, all of one dtype, fp32 or fp64: (B, n, k), (B, k, m) -> (B, n, m).

    A and B may be transposed or strided views; `out` is neither of them.
    """
    if not _is_large_fp32(a, b):
        return torch.bmm(a, b, out=out)
    if _linear_is_faster() and b.shape[2] <= _FEW_COLUMNS and a.stride(2) == 1:
        for product, left, right in zip(out, a, b, strict=True):
            product.copy_(torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], ""))
        return out
    with onednn():
        return torch.bmm(a, b, out=out)


def add_product(a: Tensor, b: Tensor, into: Tensor, scale: float) -> None:
    """into += scale A B for a batch, as in `multiply`: (B, n, k), (B, k, m), (B, n, m).

    With a scale of -1 this has the bits of into - A B where the library `adds_when_complete`.
    """
    if not _is_large_fp32(a, b):
        into.baddbmm_(a, b, alpha=scale)
        return
    with onednn():
        into.baddbmm_(a, b, alpha=scale)


def _is_large_fp32(a: Tensor, b: Tensor) -> bool:
    return a.dtype == torch.float32 and is_large(a, 2 * a.shape[1] * a.shape[2] * b.shape[2])


@cache
def adds_when_complete(n: int, k: int, m: int) -> bool:
    """Whether C - A B, by `baddbmm_` with a scale of -1, has the bits of A B subtracted from C: (n, k), (k, m), fp32.

    It does where the library adds a product when it is complete; only it can tell, so it is asked, once per shape.
    """
    # Whatever the process's default device and dtype are.
    draw = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float32)
    a, b, c = (draw(1, *shape) for shape in ((n, k), (m, k), (n, m)))
    with onednn():
        expected = c - torch.bmm(a, b.mT)
        return torch.equal(c.baddbmm_(a, b.mT, alpha=-1.0), expected)


def is_faster_turned(a: Tensor, b: Tensor) -> bool:
    """Whether A B is made faster as (B^T A^T)^T: (B, n, k), (B, k, m), fp32, where B is a factor."""
    (batch, n, k), m = a.shape, b.shape[2]
    flops = 2 * n * k * m
    if not is_large(a, flops, _FEWEST_FLOPS_TO_TURN) or a.dtype == torch.float64:
        return False
    if a.stride(2) != 1:  # M^T P
        return m <= 2 * _FEW_COLUMNS if is_large(a, flops) else m <= _FEW_COLUMNS
    return batch > 1 and m < _MKLS_COLUMNS and not is_large(a, flops)


def column_blocks(m: int) -> int:
    """In how many blocks of columns P^T M is made, where P has few and M has m: (B, n, r), (B, n, m)."""
    if not _linear_is_faster():
        return 1
    return next((m // width for width in _COLUMNS_AT_ONCE if m % width == 0), 1)


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
