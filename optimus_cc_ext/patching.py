"""Replace attributes of other packages, or of one object, and undo it in reverse."""

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_ABSENT = object()


class Patches(ExitStack):
    """Replaced attributes and environment variables. Leaving the context, or `close`, restores them in reverse order.

    An attribute that other code has replaced again in the meantime is left alone, because restoring it would remove
    that code's wrap.
    """

    def __init__(self) -> None:
        super().__init__()
        self._replaced: set[tuple[int, str]] = set()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`. Undoing restores the owner's own attribute, or deletes the new one if it was
        inherited.
        """
        self.callback(_restore, owner, name, value, vars(owner).get(name, _ABSENT))
        setattr(owner, name, value)
        self._replaced.add((id(owner), name))

    def has_replaced(self, owner: Any, name: str) -> bool:
        """Return whether `owner.name` was replaced or wrapped by this object."""
        return (id(owner), name) in self._replaced

    def wrap(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """Make every call of `owner.name` a call of `hook(original, *args, **kwargs)`.

        Args:
            owner: a module, a class, or an object. An object's method is wrapped for this object only.
        """
        wrapper = around(hook)(getattr(owner, name))
        is_static = isinstance(owner, type) and isinstance(inspect.getattr_static(owner, name), staticmethod)
        self.replace(owner, name, staticmethod(wrapper) if is_static else wrapper)

    def setenv(self, name: str, value: str) -> None:
        if name in os.environ:
            self.callback(os.environ.__setitem__, name, os.environ[name])
        else:
            self.callback(os.environ.pop, name, None)
        os.environ[name] = value


def around(hook: Callable[..., Any], *bound: Any) -> Callable[[Any], Any]:
    """Make a decorator: each call of the decorated function becomes `hook(*bound, original, *args, **kwargs)`."""

    def wrap(original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(*bound, original, *args, **kwargs)

        return wrapper

    return wrap


def _restore(owner: Any, name: str, value: Any, previous: Any) -> None:
    if vars(owner).get(name, _ABSENT) is not value:
        return
    if previous is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, previous)
