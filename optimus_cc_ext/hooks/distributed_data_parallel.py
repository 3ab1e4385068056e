"""Wraps megatron/core/distributed/distributed_data_parallel.py: every model's gradient buckets join the session."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from optimus_cc_ext.hooks.param_and_grad_buffer import attach
from optimus_cc_ext.hooks.refusals import refuse_unsupported
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session

__all__ = ["wraps"]

_TARGET = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"


def wraps(session: Session, ensure_placed: Callable[[bool], None]) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seam of this file, with what wraps it. Expert-parallel buckets are left as they are."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            refuse_unsupported(_facts(self), session.config)
            ensure_placed(self.ddp_config.use_distributed_optimizer)
            for bucket_group in self.bucket_groups:
                attach(session, bucket_group)

        return __init__

    return [(Seam(_TARGET, ("config", "ddp_config", "module")), wrap)]


def _facts(ddp: Any) -> argparse.Namespace:
    """What a wrapped model says about the run, in the names of Megatron's flags: own training loops have no flags."""
    facts = vars(ddp.ddp_config) | {
        "ddp_average_in_collective": ddp.ddp_config.average_in_collective,
        "ddp_reduce_scatter_with_fp32_accumulation": ddp.ddp_config.reduce_scatter_with_fp32_accumulation,
        "grad_reduce_in_bf16": not ddp.ddp_config.grad_reduce_in_fp32 and ddp.config.bf16,
        "context_parallel_size": ddp.config.context_parallel_size,
        "fp16": ddp.config.fp16,
        "calculate_per_token_loss": ddp.config.calculate_per_token_loss,
        "num_experts": ddp.config.num_moe_experts,
        "mtp_num_layers": ddp.config.mtp_num_layers,
        "use_ring_exchange_p2p": ddp.config.use_ring_exchange_p2p,
    }
    return argparse.Namespace(**facts)
