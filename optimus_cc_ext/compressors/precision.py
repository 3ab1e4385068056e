"""fp32 products in fp32, whatever the training script, or its image, lets cuBLAS round them to."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["fp32_products"]


@contextmanager
def fp32_products() -> Iterator[None]:
    """Inside, cuBLAS multiplies fp32 without TF32, which leaves 2^-11 of a product: no lossless limit, and residuals.

    NGC's images allow TF32 by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, scripts by `torch.set_float32_matmul_precision`. The
    driver's own NVIDIA_TF32_OVERRIDE=1 wins over all.
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
