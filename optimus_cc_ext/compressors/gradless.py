"""`torch.no_grad` for functions that call each other many times per message."""

from collections.abc import Callable
from functools import wraps

import torch

__all__ = ["gradless"]


def gradless[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function` without a graph, as under `torch.no_grad()`, which inside another costs as much as a small product."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run
