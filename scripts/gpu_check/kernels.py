"""Comparison of Triton's kernels with references: float64 products, Gram-Schmidt, torch's codecs."""

from collections.abc import Iterator
from typing import Any

import torch

from optimus_cc_ext.compressors import exact
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.low_rank import ReferenceLowRank
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.compressors.triton import exact as exact_kernels
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank
from scripts.bench.compressors.sections import FORMAT_CASES, check_basis, check_format

__all__ = ["check"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for each case: low rank at each rank, each block format, and exact differences, in each dtype."""
    on_gpu = device.type == "cuda"
    n, m, ranks = (1000, 1536, (16, 64, 128)) if on_gpu else (70, 96, (16,))
    for dtype in DTYPES:
        for rank in ranks:
            yield _low_rank(device, dtype, n, m, rank)
        for name in FORMAT_CASES:
            yield _blocks(device, dtype, name, (1 << 20) if on_gpu else 64 * BLOCK)
    for dtype in (torch.bfloat16, torch.float16):
        yield _differences(device, dtype, (1 << 20) + 77 if on_gpu else 1100)


def _low_rank(device: torch.device, dtype: torch.dtype, n: int, m: int, rank: int) -> dict[str, Any]:
    case = f"low rank {rank}, {dtype}"
    ours, reference = TritonLowRank(), ReferenceLowRank()
    generator = private_generator(18, case, device="cpu")
    matrices, residual, q = (
        torch.randn(2, *shape, generator=generator).to(device) for shape in ((n, m), (n, m), (m, rank))
    )
    matrices = matrices.to(dtype)
    total, p = torch.empty_like(residual), torch.empty(2, n, rank, device=device)
    ours.project_sum(matrices, residual, q, total=total, out=p)
    product = (matrices.double() + residual.double()) @ q.double()
    off = {"P": _off(p, product), "sum": _off(total, matrices.double() + residual.double())}
    basis = ours.orthogonalize(p)
    check_basis(p, basis, case)
    off["Q"] = _off(ours.back_project(total, basis), total.double().mT @ basis.double())
    p, q = basis.to(dtype), ours.back_project(total, basis).to(dtype)
    arrives = ours.reconstruct(p, q, out=torch.empty(2, n, m, dtype=dtype, device=device))
    expected = reference.reconstruct(p.double(), q.double())
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    off["P Q^T"] = max(0.0, _off(arrives, expected) - rounding)
    # fp32 products with 3xTF32, and sums of a thousand terms, are off by about ten units of the last bit.
    if worst := {name: value for name, value in off.items() if not value < 1e-5}:
        raise SystemExit(f"{case}: off by {worst}")
    remembered = total.clone()
    ours.subtract_reconstruction(remembered, p, q)
    if not torch.equal(remembered, total - arrives):
        raise SystemExit(f"{case}: the residual is not the sum minus what arrives")
    return {"case": case, **{f"{name}, relative error": value for name, value in off.items()}}


def _blocks(device: torch.device, dtype: torch.dtype, name: str, numel: int) -> dict[str, Any]:
    format, rotated, expected = FORMAT_CASES[name]
    generator = private_generator(18, name, device="cpu")
    signs = torch.randint(0, 2, (BLOCK,), generator=generator).mul_(2).sub_(1).float() if rotated else None
    ours, parent = TritonCodec(format, signs=signs), Codec(format, signs=signs)
    values = torch.randn(numel, generator=generator).to(device, dtype)
    check_format(ours, values, expected, f"{name}, {dtype}")
    layout = BlockLayout.of_one(numel)
    message = torch.empty(1, ours.message_bytes(layout, dtype), dtype=torch.uint8, device=device)
    ours.encode(values, layout, message)
    decoded = [torch.empty_like(values) for _ in range(2)]
    for codec, out in zip((ours, parent), decoded, strict=True):
        codec.decode(message, layout, out)
    if not torch.equal(*decoded):
        raise SystemExit(f"{name}, {dtype}: Triton and torch decode a message to different bits")
    return {"case": f"{name}, {dtype}", "decoded": "to the bit"}


def _differences(device: torch.device, dtype: torch.dtype, numel: int) -> dict[str, Any]:
    case, generator = f"exact, {dtype}", private_generator(18, "exact", device="cpu")
    weights, step = (torch.randn(numel, generator=generator) * size for size in (2e-2, 1e-4))
    old, new = weights.to(device, dtype), (weights + step).to(device, dtype)
    kernels = (exact_kernels, None)
    messages = [torch.zeros(exact.raw_bytes(numel), dtype=torch.uint8, device=device) for _ in kernels]
    lengths = [int(exact.encode(old, new, *each)) for each in zip(messages, kernels, strict=True)]
    if len({*lengths, exact.raw_bytes(numel)}) != 2 or not torch.equal(*(each[: lengths[0]] for each in messages)):
        raise SystemExit(f"{case}: Triton and torch encode other messages, of {lengths} bytes")
    for each in kernels:
        values = old.clone()
        if not (exact.decode(messages[0][: lengths[0]], values, each, raw=False) and torch.equal(values, new)):
            raise SystemExit(f"{case}: {'Triton' if each else 'torch'} decodes other values than were encoded")
    return {"case": case, "decoded": "to the bit"}


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())
