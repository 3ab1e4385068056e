"""Wraps megatron/core/pipeline_parallel/schedules.py: an iteration begins and ends with a forward-backward pass."""

import functools
from collections.abc import Callable
from typing import Any

from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session

__all__ = ["wraps"]

_MODULE = "megatron.core.pipeline_parallel.schedules"
_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


def wraps(session: Session, ensure_placed: Callable[[], None]) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seams of this file, with what wraps them. Evaluation is forward only and passes through untouched."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_backward(*, num_microbatches: int, forward_only: bool = False, **rest: Any) -> Any:
            def run() -> Any:
                return original(num_microbatches=num_microbatches, forward_only=forward_only, **rest)

            if forward_only:
                return run()
            ensure_placed()
            with session.iteration(num_microbatches):
                return run()

        return forward_backward

    return [(Seam(f"{_MODULE}:{name}", ("num_microbatches", "forward_only")), wrap) for name in _SCHEDULES]
