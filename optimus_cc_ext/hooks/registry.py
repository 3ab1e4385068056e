"""Registry of the attributes of Megatron that are wrapped: it checks that they are as expected, and undoes the wraps.

A seam is one attribute of one Megatron module. Wraps are registered first and applied together: either every seam holds
and all are wrapped, or nothing is touched.
"""

import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

from optimus_cc_ext.errors import UnsupportedMegatron
from optimus_cc_ext.patching import Patches

SUPPORTED_MEGATRON = ("0.17.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2")
"""Releases of megatron-core that CI tests; the last one is the reference. 0.19.0 is the wheel that Megatron-Bridge 0.6
uses; 0.19.1 is the version that Megatron-LM reports at the tag core_v0.19.0, and its wheel was withdrawn.
"""

TESTED = ("0.16.0rc0", "0.16.0", "0.16.1", *SUPPORTED_MEGATRON, "0.20.0")
"""Versions that trained, in order; those of forks and of Megatron-LM's main branch name several trees each."""

UNSUPPORTED_MEGATRON_VARIABLE = "OPTIMUS_CC_UNSUPPORTED_MEGATRON"


@dataclass(frozen=True)
class Seam:
    """Attribute of Megatron that is wrapped.

    Attributes:
        target: "package.module:name" or "package.module:Class.name".
        parameters: names of parameters that the target must have; it may have more.
        imported_by: modules that import the target by name, in one of the supported versions. They keep what they
            imported, so the wrap is put there, too.
    """

    target: str
    parameters: tuple[str, ...] = ()
    imported_by: tuple[str, ...] = ()

    def resolve(self) -> tuple[Any, str, Any]:
        """Return (owner, attribute name, current value).

        Raises:
            UnsupportedMegatron: the target is missing, or lacks a parameter.
        """
        module_name, _, path = self.target.partition(":")
        *outer, name = path.split(".")
        try:
            # The module is imported by its full name: as an attribute of the package,
            # megatron.core.distributed.finalize_model_grads is a function.
            owner: Any = importlib.import_module(module_name)
            for attribute in outer:
                owner = getattr(owner, attribute)
            value = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise UnsupportedMegatron(
                f"megatron-core {megatron_version()}: {self.target} is missing ({error}). {cure()}"
            ) from error
        found = inspect.signature(value).parameters
        missing = [parameter for parameter in self.parameters if parameter not in found]
        if missing:
            advice = cure()
            if value.__module__.split(".")[0] != module_name.split(".")[0]:
                advice = (
                    f"{value.__module__}.{value.__qualname__} has replaced it: let the replacement keep the signature "
                    "(functools.wraps), or make it after Optimus-CC has wrapped the function"
                )
            raise UnsupportedMegatron(
                f"megatron-core {megatron_version()}: {self.target} has no parameter {', '.join(missing)} "
                f"(it has: {', '.join(found)}). {advice}"
            )
        return owner, name, value

    def importers(self, name: str, value: Any) -> list[Any]:
        """Return the modules in `imported_by` that hold `value` as `name`; other modules will import the wrap."""
        modules = (sys.modules.get(module) for module in self.imported_by)
        return [module for module in modules if getattr(module, name, None) is value]


class AppliedWraps(Patches):
    """Wraps that are applied to Megatron; `close` removes them."""

    def apply(self, wraps: Iterable[tuple[Seam, Callable[[Any], Any]]]) -> None:
        """Wrap every seam: replace its current value by the result of calling its factory with that value.

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
    """Return the release of the megatron-core that would be imported, such as "0.19.2".

    Megatron appends the commit of the git repository that contains it. For an environment inside another project's
    checkout that is the other project's commit, so the part after a "+" says nothing about Megatron.

    Raises:
        UnsupportedMegatron: there is no megatron-core, or one without a version.
    """
    try:
        return str(importlib.import_module("megatron.core.package_info").__version__).split("+")[0]
    except ImportError as error:
        core = getattr(sys.modules.get("megatron.core"), "__file__", None)
        found = f"{core} is of another project, or of an older Megatron" if core else "megatron-core is not installed"
        raise UnsupportedMegatron(f"{found} ({error}). {cure()}") from error


def check_one_megatron() -> None:
    """Refuse a script whose own changes of `sys.path` lead to another Megatron than the imported one.

    Raises:
        UnsupportedMegatron: they do; the message names both folders.
    """
    package = _spec("megatron", None)
    for name in ("megatron.core", "megatron.training"):
        imported = getattr(sys.modules.get(name), "__file__", None)
        found = _spec(name, package.submodule_search_locations) if package is not None else None
        if imported and found and found.origin and os.path.realpath(imported) != os.path.realpath(found.origin):
            wanted = os.path.dirname(os.path.dirname(os.path.dirname(found.origin)))
            raise UnsupportedMegatron(
                f"{name} was imported from {os.path.dirname(imported)}, but the script has changed sys.path, and would "
                f"import it from {os.path.dirname(found.origin)}. Let both see the same: PYTHONPATH={wanted}"
            )


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module as if none had been imported."""
    finders = (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for find_spec in finders if (spec := find_spec(name, path))), None)


def cure() -> str:
    """Return the advice to install the version against which all tests run."""
    return f"Install megatron-core=={SUPPORTED_MEGATRON[-1]}"
