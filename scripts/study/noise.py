"""Noise on the gradients of vanilla Megatron, before the replicas sum them: a control of the study.

The tied embedding's copies stay equal, because each rank's own contribution gets its noise before any sum.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.training import get_args

from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.tools import pretrain_gpt

Noise = Callable[[torch.Tensor, torch.Generator], None]
"""Function that changes a flat gradient buffer in place."""


def relative_noise(gradients: torch.Tensor, generator: torch.Generator, size: float = 1e-6) -> None:
    """Multiply each gradient by 1 + Gaussian noise of the standard deviation `size`."""
    gradients.mul_(1 + size * torch.randn(gradients.shape, generator=generator))


def block_noise(gradients: torch.Tensor, generator: torch.Generator, error: float) -> None:
    """Add Gaussian noise whose norm is, in the mean, `error` times the norm of each block of the buffer."""
    whole = len(gradients) // BLOCK * BLOCK
    for part in (gradients[:whole].view(-1, BLOCK), gradients[whole:].view(1, -1)):
        if part.numel():
            scale = error * part.square().mean(1, keepdim=True).sqrt()
            part.add_(scale * torch.randn(part.shape, generator=generator))


def train_with(noise: Noise) -> None:
    """Train with the package's own entry point; `noise` changes a bucket's gradients just before their reduction."""
    reduce = _ParamAndGradBucketGroup.start_grad_sync
    generator: list[torch.Generator] = []

    @functools.wraps(reduce)
    def noisy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not generator:
            seed = 1_000_003 * get_args().seed + torch.distributed.get_rank()
            generator.append(torch.Generator().manual_seed(seed))
        for bucket in self.buckets:
            noise(bucket.grad_data, generator[0])
        return reduce(self, *args, **kwargs)

    _ParamAndGradBucketGroup.start_grad_sync = noisy
    pretrain_gpt.main()
