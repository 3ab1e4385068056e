"""Wraps megatron/core/optimizer/distrib_optimizer.py: what a step changed in a replica's shard becomes a message."""

import functools
from collections.abc import Callable
from typing import Any

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session

__all__ = ["wraps"]

_TARGET = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params"


def wraps(session: Session) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seam of this file, with what wraps it; none where parameters are gathered as they are."""
    if session.parameters.codec is None:
        return []

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def copy(self: Any) -> None:
            if self.config.use_precision_aware_optimizer:
                # In a custom training loop: nobody has seen its optimizer's configuration before.
                reason = "a precision-aware optimizer writes parameters by itself, and nobody could tell what changed"
                raise FlagError("--param-gather-format", reason, "Leave out one of the two")
            buckets = [bucket for buffer in getattr(self, "buffers", ()) for bucket in buffer.buckets]
            with session.parameters.updating(buckets):
                original(self)

        return copy

    return [(Seam(_TARGET, ("self",)), wrap)]
