"""Reference of the Python API, made from signatures and docstrings: scripts/api_reference.sh FILE."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from optimus_cc_ext import api, bridge, collectives, errors
from optimus_cc_ext.hooks.handle import Handle
from optimus_cc_ext.hooks.steps import Step

LEAD = """# Python API

Made by `scripts/api_reference.sh`. Functions of `optimus_cc_ext.api` are there as `optimus_cc_ext.NAME`, too. The
fields of `OptimusConfig` are the flags of docs/flags.md, with underscores.
"""


def entry(name: str, thing: Any, level: int) -> str:
    """Return the section of a function, method or class: its name, signature and docstring."""
    try:
        signature = f"\n```python\n{name.rpartition('.')[2]}{inspect.signature(thing)}\n```\n"
    except (TypeError, ValueError):
        signature = ""
    return f"\n{'#' * level} `{name}`\n{signature}\n{inspect.getdoc(thing) or ''}\n"


def sections() -> Iterator[str]:
    """Yield the sections of all public functions and classes, with the public methods of classes."""
    listed: list[tuple[str, Any]] = []
    for module in (api, bridge, collectives, errors):
        assert isinstance(module, ModuleType)
        listed += [(f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__]
    listed += [(f"{each.__module__}.{each.__name__}", each) for each in (Handle, Step)]
    for name, thing in listed:
        yield entry(name, thing, 3)
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    yield entry(f"{name}.{member}", value, 4)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(LEAD + "".join(sections()))
