"""Coalesced all-gathers over gloo, one tensor at a time.

In PyTorch 2.13 two of them under way in one process group corrupt memory: gloo's threads, in
`AsyncAllgatherCoalescedWork`, end the process with "malloc(): unaligned tcache chunk" or a segmentation fault, once in
a few minutes, or wait for ever. Megatron has several under way with --overlap-param-gather: one per bucket. The plain
all-gather does the same without that, and on a CPU there is nothing to gain from coalescing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.cpu_runtime.patching import Patches

__all__ = ["install"]

# What `torch.distributed._coalescing_manager` calls; until PyTorch 2.12 under the older name.
_NAMES = {"all_gather_single_coalesced": "all_gather_single", "allgather_into_tensor_coalesced": "_allgather_base"}


def install(patches: Patches) -> None:
    """Replace the methods of `torch.distributed.ProcessGroup`."""
    for coalesced, single in _NAMES.items():
        if hasattr(dist.ProcessGroup, coalesced) and hasattr(dist.ProcessGroup, single):
            patches.replace(dist.ProcessGroup, coalesced, _one_by_one(getattr(dist.ProcessGroup, single)))


def _one_by_one(gather: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_coalesced(
        group: dist.ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *options: Any
    ) -> Any:
        works = [gather(group, into, tensor, *options) for into, tensor in zip(outputs, inputs, strict=True)]
        return SimpleNamespace(wait=lambda *timeout: all([work.wait(*timeout) for work in works]))

    return all_gather_coalesced
