"""Attribute replacement that can be undone."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """Replaced attributes and environment variables; :meth:`undo` restores them in reverse order."""

    def __init__(self) -> None:
        self._attributes: list[tuple[Any, str, Any]] = []
        self._environment: list[tuple[str, str | None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; what the owner itself holds (not what it inherits) is remembered."""
        self._attributes.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def set_default_env(self, name: str, value: str) -> None:
        """Set an environment variable, unless the user already did."""
        if name not in os.environ:
            self._environment.append((name, None))
            os.environ[name] = value

    def force_env(self, name: str, value: str) -> None:
        """Set an environment variable, whatever it was."""
        self._environment.append((name, os.environ.get(name)))
        os.environ[name] = value

    def names_replaced_on(self, owner: Any) -> set[str]:
        """The attributes of ``owner`` replaced so far."""
        return {name for changed, name, _ in self._attributes if changed is owner}

    def undo(self) -> None:
        """Put everything back; safe to call twice."""
        while self._attributes:
            owner, name, previous = self._attributes.pop()
            if previous is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)
        while self._environment:
            name, value = self._environment.pop()
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
