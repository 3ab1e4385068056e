"""Seams on a Megatron made for the test: refused by name and version, wrapped all or none, and unwrapped again."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from optimus_cc_ext.errors import UnsupportedMegatron
from optimus_cc_ext.hooks.registry import (
    SUPPORTED_MEGATRON,
    AppliedWraps,
    Seam,
    megatron_version,
)

MODULE = "a_package.a_module"
FUNCTION, METHOD = f"{MODULE}:function", f"{MODULE}:Class.method"
INSTALL = f"Install megatron-core=={SUPPORTED_MEGATRON[-1]}"


@pytest.fixture(autouse=True)
def megatron(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Make the modules that the registry imports to learn Megatron's version."""
    package_info = types.ModuleType("megatron.core.package_info")
    package_info.__version__ = SUPPORTED_MEGATRON[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package_info.__name__, package_info)
    return package_info


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Make a module with a function and a class, as Megatron has them."""

    def function(model: str, config: str, *, group: str = "all") -> str:
        return f"{model} {config} {group}"

    class Class:
        def method(self, bucket: int) -> int:
            return bucket

    function.__module__ = MODULE
    made = types.ModuleType(MODULE)
    made.function, made.Class = function, Class  # type: ignore[attr-defined]
    # The package's attribute with the module's name is another object, as in `megatron.core.distributed`.
    package = types.ModuleType("a_package")
    package.a_module = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_package", package)
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


def loudly(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: f"{original(*args, **kwargs)}!"


def refused(action: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(UnsupportedMegatron) as caught:
        action(*args)
    return str(caught.value)


def test_a_seam_is_found_in_the_module_and_may_have_more_parameters_than_are_needed(module: types.ModuleType) -> None:
    assert Seam(FUNCTION, ("model", "group")).resolve() == (module, "function", module.function)
    assert Seam(METHOD, ("bucket",)).resolve() == (module.Class, "method", module.Class.method)


@pytest.mark.parametrize(
    ("target", "needed", "reason"),
    [
        (f"{MODULE}:gone", (), "is missing"),
        (f"{MODULE}:Class.gone", (), "is missing"),
        (f"{MODULE}:Gone.method", (), "is missing"),
        ("a_package.gone:function", (), "is missing"),
        (FUNCTION, ("model", "stage", "rank"), "has no parameter stage, rank (it has: model, config, group)"),
    ],
)
def test_what_is_missing_is_refused_by_name_and_version(
    module: types.ModuleType, target: str, needed: tuple[str, ...], reason: str
) -> None:
    said = refused(Seam(target, needed).resolve)
    assert f"megatron-core {SUPPORTED_MEGATRON[-1]}: {target} {reason}" in said
    assert INSTALL in said


def test_whoever_replaced_a_function_and_changed_its_parameters_is_named(module: types.ModuleType) -> None:
    module.function = loudly(module.function)  # type: ignore[attr-defined]
    said = refused(Seam(FUNCTION, ("model",)).resolve)
    assert f"{__name__}.loudly.<locals>.<lambda> has replaced it" in said and "functools.wraps" in said


def test_wraps_are_on_after_applying_even_twice_and_off_after_removing(module: types.ModuleType) -> None:
    function, method = module.function, module.Class.method
    applied = AppliedWraps()
    applied.apply([(Seam(FUNCTION), loudly), (Seam(METHOD), loudly)])
    assert module.function("a", "b", group="c") == "a b c!"
    assert module.Class().method(3) == "3!"
    applied.apply([(Seam(FUNCTION), loudly)])
    assert module.function("a", "b") == "a b all!!"
    applied.close()
    assert module.function is function and module.Class.method is method
    applied.close()  # closing a second time does nothing


def test_if_one_seam_does_not_hold_none_is_wrapped(module: types.ModuleType) -> None:
    function = module.function
    applied = AppliedWraps()
    assert "gone" in refused(applied.apply, [(Seam(FUNCTION), loudly), (Seam(f"{MODULE}:gone"), loudly)])
    assert module.function is function
    module.function = loudly(function)
    applied.close()
    assert module.function is not function, "there was nothing to take off"


def test_a_seam_that_somebody_wrapped_later_is_left_alone(module: types.ModuleType) -> None:
    method = module.Class.method
    applied = AppliedWraps()
    applied.apply([(Seam(FUNCTION), loudly), (Seam(METHOD), loudly)])
    theirs = loudly(module.function)
    module.function = theirs
    applied.close()
    assert module.function is theirs and module.function("a", "b") == "a b all!!"
    assert module.Class.method is method, "the others are taken off all the same"


def test_a_wrap_is_put_where_the_target_was_imported_by_name_too(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = module.function
    importer, bystander = types.ModuleType("an_importer"), types.ModuleType("a_bystander")
    importer.function = function  # type: ignore[attr-defined]
    bystander.function = theirs = loudly(function)  # type: ignore[attr-defined]
    for other in (importer, bystander):
        monkeypatch.setitem(sys.modules, other.__name__, other)
    names = ("an_importer", "a_bystander", "not_imported_yet")
    applied = AppliedWraps()
    applied.apply([(Seam(FUNCTION, imported_by=names), loudly)])
    assert importer.function is module.function and importer.function("a", "b") == "a b all!"
    assert bystander.function is theirs, "it holds something else by that name"
    applied.close()
    assert importer.function is module.function is function


# If the environment is inside a git checkout, that checkout's commit is appended.
@pytest.mark.parametrize(
    "version", ["0.17.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2", f"{SUPPORTED_MEGATRON[-1]}+416f5c1"]
)
def test_a_version_is_the_same_whatever_commit_is_appended(megatron: types.ModuleType, version: str) -> None:
    megatron.__version__ = version  # type: ignore[attr-defined]
    assert megatron_version() == version.partition("+")[0]


@pytest.mark.parametrize("there", [False, True])
def test_an_absent_megatron_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)
    theirs = types.ModuleType("megatron.core")  # such as that of Megatron-DeepSpeed
    theirs.__file__ = "/theirs/megatron/core/__init__.py"
    monkeypatch.setitem(sys.modules, "megatron.core", theirs if there else None)  # type: ignore[arg-type]
    said = refused(megatron_version)
    assert ("is of another project" if there else "megatron-core is not installed") in said
    assert (str(theirs.__file__) in said) == there and INSTALL in said
