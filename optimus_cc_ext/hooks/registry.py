"""Which attributes of Megatron are wrapped, whether they are still what they were, and how to take the wraps off.

A seam is one attribute of one Megatron module. Wraps are registered first and applied together: either every seam
holds and all are wrapped, or nothing is touched.
"""

import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.errors import UnsupportedMegatron
from optimus_cc_ext.patching import Patches

__all__ = [
    "SUPPORTED_MEGATRON",
    "UNSUPPORTED_MEGATRON_VARIABLE",
    "AppliedWraps",
    "Seam",
    "arguments_of",
    "check_version",
    "megatron_version",
]

SUPPORTED_MEGATRON = ("0.17.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2")
"""Versions of megatron-core whose seams were tested; the last one is the reference. 0.19.0 is the wheel
that Megatron-Bridge 0.6 takes; 0.19.1 is what Megatron-LM calls itself at the tag core_v0.19.0, and its wheel was
withdrawn."""

UNSUPPORTED_MEGATRON_VARIABLE = "OPTIMUS_CC_UNSUPPORTED_MEGATRON"


@dataclass(frozen=True)
class Seam:
    """One attribute of Megatron that is wrapped.

    Attributes:
        target: "package.module:name" or "package.module:Class.name".
        parameters: parameters that the target must have, by name; it may have more.
        imported_by: modules that import the target by name, in one of the supported versions. They keep what they
            imported, so the wrap is put there too.
    """

    target: str
    parameters: tuple[str, ...] = ()
    imported_by: tuple[str, ...] = ()

    def resolve(self) -> tuple[Any, str, Any]:
        """(owner, attribute name, current value).

        Raises:
            UnsupportedMegatron: the target is missing, or lacks a parameter.
        """
        module_name, _, path = self.target.partition(":")
        *outer, name = path.split(".")
        try:
            # Not through the package's attributes: megatron.core.distributed.finalize_model_grads, for one, names a
            # function there, and a module here.
            owner: Any = importlib.import_module(module_name)
            for attribute in outer:
                owner = getattr(owner, attribute)
            value = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise UnsupportedMegatron(
                f"megatron-core {megatron_version()}: {self.target} is missing ({error}). {_cure()}"
            ) from error
        found = inspect.signature(value).parameters
        missing = [parameter for parameter in self.parameters if parameter not in found]
        if missing:
            raise UnsupportedMegatron(
                f"megatron-core {megatron_version()}: {self.target} has no parameter {', '.join(missing)} "
                f"(it has: {', '.join(found)}). {_cure()}"
            )
        return owner, name, value

    def importers(self, name: str, value: Any) -> list[Any]:
        """The modules in `imported_by` that hold `value` by this name: those that did not will import the wrap."""
        modules = (sys.modules.get(module) for module in self.imported_by)
        return [module for module in modules if getattr(module, name, None) is value]


class AppliedWraps(Patches):
    """The wraps that are on Megatron, so that `close` takes them off again."""

    def apply(self, wraps: Iterable[tuple[Seam, Callable[[Any], Any]]]) -> None:
        """Wrap every seam: each gets what its factory makes of the current value.

        Raises:
            UnsupportedMegatron: a seam does not hold; then none is wrapped.
        """
        resolved = [(seam, seam.resolve(), factory) for seam, factory in wraps]
        for seam, (owner, name, original), factory in resolved:
            wrapped = factory(original)
            for holder in (owner, *seam.importers(name, original)):
                self.replace(holder, name, wrapped)


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `function` by name, defaults included."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def megatron_version() -> str:
    """The release of the megatron-core that would be imported, such as "0.19.2".

    Megatron appends the commit of the git repository that it lies in, which for an environment inside a checkout of
    something else is that other project's: what follows a "+" says nothing about Megatron.

    Raises:
        UnsupportedMegatron: there is none.
    """
    try:
        return str(importlib.import_module("megatron.core.package_info").__version__).split("+")[0]
    except ImportError as error:
        raise UnsupportedMegatron(
            f"megatron-core is not installed ({error}). Install megatron-core=={SUPPORTED_MEGATRON[-1]}"
        ) from error


def check_version() -> None:
    """Refuse a Megatron that was not tested, unless the environment says to go on.

    Raises:
        UnsupportedMegatron: naming the version, the supported ones, and the variable.
    """
    version = megatron_version()
    if version not in SUPPORTED_MEGATRON and os.environ.get(UNSUPPORTED_MEGATRON_VARIABLE) != "1":
        raise UnsupportedMegatron(
            f"megatron-core {version} is not supported (supported: {', '.join(SUPPORTED_MEGATRON)}). {_cure()}, "
            f"or set {UNSUPPORTED_MEGATRON_VARIABLE}=1 to try it without any promise"
        )


def _cure() -> str:
    return f"Install megatron-core=={SUPPORTED_MEGATRON[-1]}"
