"""Wraps megatron/core/optimizer/distrib_optimizer.py: a step's change of this replica's shard becomes a message."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.patching import around

_TARGET = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params"


def wraps(sessions: Sessions) -> list[tuple[Seam, Callable[[Any], Any]]]:
    return [(Seam(_TARGET, ("self",)), around(copy_parameters, sessions))]


def copy_parameters(sessions: Sessions, original: Callable[..., None], optimizer: Any) -> None:
    """Encode a step's changes of this replica's shards as messages, in place of Megatron's gather of whole
    parameters.
    """
    buckets = [bucket for buffer in getattr(optimizer, "buffers", ()) for bucket in buffer.buckets]
    gathers = [session.parameters for session in sessions if session.parameters.of(buckets)]
    if gathers and optimizer.config.use_precision_aware_optimizer:
        # Only a custom training loop gets here: the configuration of its optimizer was not known before.
        reason = "a precision-aware optimizer writes parameters by itself, so that their change is unknown"
        raise FlagError("--param-gather-format", reason, "Leave out one of the two")
    with ExitStack() as updates:
        for parameters in gathers:
            updates.enter_context(parameters.updating(buckets))
        original(optimizer)
