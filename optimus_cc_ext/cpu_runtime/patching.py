"""Attribute replacement that can be undone."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class Patches(ExitStack):
    """Replaced attributes and environment variables; leaving it, or :meth:`close`, restores them in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: set[tuple[Any, str]] = set()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; what the owner itself holds (not what it inherits) is remembered."""
        previous = vars(owner).get(name, _ABSENT)
        if previous is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, previous)
        setattr(owner, name, value)
        self.replaced.add((owner, name))

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Make every call of ``owner.name`` a call of ``around(original, *args, **kwargs)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        is_static = isinstance(vars(owner).get(name), staticmethod)
        self.replace(owner, name, staticmethod(wrapper) if is_static else wrapper)

    def setenv(self, name: str, value: str) -> None:
        """Set an environment variable."""
        if name in os.environ:
            self.callback(os.environ.__setitem__, name, os.environ[name])
        else:
            self.callback(os.environ.pop, name, None)
        os.environ[name] = value
