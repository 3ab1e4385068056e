"""Wraps megatron/core/distributed/distributed_data_parallel.py: every model's gradient buckets join the session."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

from optimus_cc_ext.hooks.param_and_grad_buffer import attach
from optimus_cc_ext.hooks.refusals import refuse_unsupported
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session

__all__ = ["wraps"]

_TARGET = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"


def wraps(session: Session, ensure_placed: Callable[[Any, bool], None]) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seam of this file, with what wraps it."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            refuse_unsupported(_facts(self), session.config)
            ensure_placed(self.config, self.ddp_config.use_distributed_optimizer)
            experts = _expert_parameters(self.module)
            for bucket_group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
                attach(session, bucket_group, experts=experts)

        return __init__

    return [(Seam(_TARGET, ("config", "ddp_config", "module")), wrap)]


def _expert_parameters(module: torch.nn.Module) -> frozenset[torch.nn.Parameter]:
    """The weights of a mixture's routed experts: low rank leaves them dense, whatever the expert parallelism.

    An expert's gradient comes from the few tokens that were routed to it, on some replicas from none: what one step
    leaves out is not what a later step lacks. Only with expert parallelism does Megatron give them buckets (and a
    group of ranks) of their own; without it they lie among the others, so they are told by their place in the model:
    `MoELayer.experts` (megatron/core/transformer/moe/moe_layer.py). Shared experts and routers see every token.
    """
    return frozenset(p for name, p in module.named_parameters() if ".experts." in name)


def _facts(ddp: Any) -> argparse.Namespace:
    """What a wrapped model says about the run, in the names of Megatron's flags: custom training loops have none."""
    facts = vars(ddp.ddp_config) | {
        "ddp_reduce_scatter_with_fp32_accumulation": ddp.ddp_config.reduce_scatter_with_fp32_accumulation,
        "ddp_param_name_patterns_for_fp32_local_accumulation": getattr(
            ddp.ddp_config, "param_name_patterns_for_fp32_local_accumulation", None
        ),
        "context_parallel_size": ddp.config.context_parallel_size,
        "fp16": ddp.config.fp16,
        "overlap_moe_expert_parallel_comm": getattr(ddp.config, "overlap_moe_expert_parallel_comm", False),
        "gtp_weight_remat_size": getattr(ddp.config, "gtp_weight_remat_size", 1),
        "expert_gtp_weight_remat_size": getattr(ddp.config, "expert_gtp_weight_remat_size", 1),
        "mtp_num_layers": ddp.config.mtp_num_layers,
        "use_ring_exchange_p2p": ddp.config.use_ring_exchange_p2p,
    }
    return argparse.Namespace(**facts)
