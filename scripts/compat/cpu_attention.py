"""Attention over context-parallel ranks on a CPU, in place of Transformer Engine's, which takes a GPU.

Megatron's local attention knows one rank only. Here keys and values are all-gathered over the context-parallel group,
and an explicit mask lets each position see the positions before it. Each rank holds two pieces of the sequence, one
from either end, as Megatron's `get_batch_on_this_cp_rank` deals them out.
"""

from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.patching import Patches

__all__ = ["install"]


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension, in rank order; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        whole = gradients[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole.view(ctx.group.size(), -1, *whole.shape[1:])[ctx.group.rank()].contiguous(), None


def _positions(ranks: int, length: int) -> torch.Tensor:
    """Return the position of each token in the sequence, by rank: (ranks, length / ranks)."""
    pieces = torch.arange(length).view(2 * ranks, -1)
    return torch.stack([torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]]) for rank in range(ranks)])


def install() -> None:
    """Let Megatron's local attention work with `--context-parallel-size` above 1, for the rest of this process."""
    from megatron.core import mpu
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    def init(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        ranks, config.context_parallel_size = config.context_parallel_size, 1
        original(self, config, *args, **kwargs)
        config.context_parallel_size = ranks
        if ranks > 1:  # the mask is passed in, so that the softmax need not make one
            self.scale_mask_softmax.attn_mask_type = AttnMaskType.arbitrary

    def forward(original: Any, self: Any, query: Any, key: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        group = mpu.get_context_parallel_group()
        if group.size() > 1:
            key, value = _Gather.apply(key, group), _Gather.apply(value, group)
            positions = _positions(group.size(), key.shape[0])
            mask = (positions.reshape(-1)[None, :] > positions[group.rank()][:, None])[None, None]
            more.pop("attn_mask_type", None)
        return original(self, query, key, value, mask, *rest, **more)

    patches = Patches()  # the patches are never undone: this process trains one model
    patches.wrap(DotProductAttention, "__init__", init)
    patches.wrap(DotProductAttention, "forward", forward)
