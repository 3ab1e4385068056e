"""Wraps megatron/core/distributed/distributed_data_parallel.py: every model's gradient buckets join the session."""

import functools
from collections.abc import Callable
from typing import Any

from optimus_cc_ext.hooks.param_and_grad_buffer import attach
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session

__all__ = ["wraps"]

_TARGET = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"


def wraps(session: Session, ensure_placed: Callable[[], None]) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seam of this file, with what wraps it. Expert-parallel buckets are left as they are."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            ensure_placed()
            for bucket_group in self.bucket_groups:
                attach(session, bucket_group)

        return __init__

    return [(Seam(_TARGET, ("config", "ddp_config", "module")), wrap)]
