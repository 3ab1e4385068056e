"""Numerics that are the same on every machine: products in full fp32, and random streams of our own."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fp32_products() -> Iterator[None]:
    """Multiply fp32 in fp32 inside the context, whatever precision the training script or its image allows cuBLAS.

    TF32 rounds operands to 2^-11, which would break the lossless limits and the residuals. NGC's images allow TF32 by
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, scripts by `torch.set_float32_matmul_precision`. The driver's own
    NVIDIA_TF32_OVERRIDE=1 overrides all, this context included.
    """
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision
    if allowed != "tf32":
        yield
        return
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = allowed


def keep_in_range(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    """Keep decoded fp32 values, in place, where `dtype` is finite; blocks whose scale is not finite stay as they are.

    Args:
        values: (b, n), a block in each row.
        scale: (b, 1), overwritten. A finite scale of values in `dtype` lies in the range of `dtype`.
    """
    limit = scale.clamp_(min=torch.finfo(dtype).max)
    torch.minimum(values, limit, out=values)
    torch.maximum(values, limit.neg_(), out=values)


def private_generator(seed: int, *salt: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator of our own; torch's global generators, which drive dropout and initialisation, are never
    touched.

    Args:
        seed: `--compression-seed`.
        salt: the purpose of this generator, e.g. ("compressed_backprop", stage). Equal arguments give the same stream
            in every process on every machine, different arguments give unrelated streams; 1 and "1" differ, and so do
            ("ab",) and ("a", "b").
        device: the device on which it draws. A CPU and a CUDA generator of one seed draw different numbers.
    """
    key = repr((seed, *salt)).encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    # 63 bits, because torch reads a seed as a signed 64-bit integer.
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
