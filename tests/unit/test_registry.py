"""Seams on a Megatron made for the test: refused by name and version, wrapped all or none, and taken off again."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from optimus_cc_ext.errors import UnsupportedMegatron
from optimus_cc_ext.hooks.registry import (
    SUPPORTED_MEGATRON,
    UNSUPPORTED_MEGATRON_VARIABLE,
    AppliedWraps,
    Seam,
    check_version,
    megatron_version,
)

MODULE = "a_package.a_module"


@pytest.fixture(autouse=True)
def megatron(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What the registry imports to learn Megatron's version."""
    package_info = types.ModuleType("megatron.core.package_info")
    package_info.__version__ = SUPPORTED_MEGATRON[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package_info.__name__, package_info)
    monkeypatch.delenv(UNSUPPORTED_MEGATRON_VARIABLE, raising=False)
    return package_info


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with a function and a class, as Megatron has them."""

    def function(model: str, config: str, *, group: str = "all") -> str:
        return f"{model} {config} {group}"

    class Class:
        def method(self, bucket: int) -> int:
            return bucket

    made = types.ModuleType(MODULE)
    made.function, made.Class = function, Class  # type: ignore[attr-defined]
    # As `megatron.core.distributed`: the package's attribute of the module's name is something else.
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


def test_a_seam_is_found_in_the_module_and_not_through_its_package(module: types.ModuleType) -> None:
    assert Seam(f"{MODULE}:function", ("model", "group")).resolve() == (module, "function", module.function)
    assert Seam(f"{MODULE}:Class.method", ("bucket",)).resolve() == (module.Class, "method", module.Class.method)


@pytest.mark.parametrize(
    "target", [f"{MODULE}:gone", f"{MODULE}:Class.gone", f"{MODULE}:Gone.method", "a_package.gone:function"]
)
def test_a_missing_target_is_refused_by_name_and_version(module: types.ModuleType, target: str) -> None:
    said = refused(Seam(target).resolve)
    assert f"megatron-core {SUPPORTED_MEGATRON[-1]}: {target} is missing" in said
    assert f"Install megatron-core=={SUPPORTED_MEGATRON[-1]}" in said


def test_a_missing_parameter_is_refused_by_name_and_version(module: types.ModuleType) -> None:
    said = refused(Seam(f"{MODULE}:function", ("model", "stage", "rank")).resolve)
    assert f"megatron-core {SUPPORTED_MEGATRON[-1]}: {MODULE}:function has no parameter stage, rank" in said
    assert "it has: model, config, group" in said
    assert f"Install megatron-core=={SUPPORTED_MEGATRON[-1]}" in said


def test_a_seam_may_have_more_parameters_than_are_needed(module: types.ModuleType) -> None:
    Seam(f"{MODULE}:function", ("config",)).resolve()


def test_wraps_are_on_after_applying_and_off_after_removing(module: types.ModuleType) -> None:
    function, method = module.function, module.Class.method
    applied = AppliedWraps()
    applied.apply([(Seam(f"{MODULE}:function"), loudly), (Seam(f"{MODULE}:Class.method"), loudly)])
    assert module.function("a", "b", group="c") == "a b c!"
    assert module.Class().method(3) == "3!"
    applied.remove()
    assert module.function is function and module.Class.method is method
    applied.remove()  # nothing is left to do


def test_if_one_seam_does_not_hold_none_is_wrapped(module: types.ModuleType) -> None:
    function = module.function
    applied = AppliedWraps()
    assert "gone" in refused(applied.apply, [(Seam(f"{MODULE}:function"), loudly), (Seam(f"{MODULE}:gone"), loudly)])
    assert module.function is function
    module.function = loudly(function)
    applied.remove()
    assert module.function is not function, "there was nothing to take off"


def test_a_seam_wrapped_twice_gets_its_original_back(module: types.ModuleType) -> None:
    function = module.function
    applied = AppliedWraps()
    applied.apply([(Seam(f"{MODULE}:function"), loudly)])
    applied.apply([(Seam(f"{MODULE}:function"), loudly)])
    assert module.function("a", "b") == "a b all!!"
    applied.remove()
    assert module.function is function


def test_a_seam_that_somebody_wrapped_later_is_left_alone(module: types.ModuleType) -> None:
    method = module.Class.method
    applied = AppliedWraps()
    applied.apply([(Seam(f"{MODULE}:function"), loudly), (Seam(f"{MODULE}:Class.method"), loudly)])
    theirs = loudly(module.function)
    module.function = theirs
    applied.remove()
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
    applied.apply([(Seam(f"{MODULE}:function", imported_by=names), loudly)])
    assert importer.function is module.function and importer.function("a", "b") == "a b all!"
    assert bystander.function is theirs, "it holds something else by that name"
    applied.remove()
    assert importer.function is module.function is function


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.1", "0.19.2"])
def test_a_supported_version_passes(megatron: types.ModuleType, version: str) -> None:
    megatron.__version__ = version  # type: ignore[attr-defined]
    check_version()
    assert megatron_version() == version


def test_the_commit_that_megatron_appends_to_its_version_is_not_part_of_it(megatron: types.ModuleType) -> None:
    # Seen with an environment inside a git checkout: it is then that checkout's commit.
    megatron.__version__ = f"{SUPPORTED_MEGATRON[-1]}+416f5c1"  # type: ignore[attr-defined]
    check_version()
    assert megatron_version() == SUPPORTED_MEGATRON[-1]


@pytest.mark.parametrize("version", ["0.16.1", "0.18.0", "0.19.0", "0.19.20", "0.99.0"])
def test_an_unsupported_version_is_refused_by_its_number(megatron: types.ModuleType, version: str) -> None:
    megatron.__version__ = version  # type: ignore[attr-defined]
    said = refused(check_version)
    assert f"megatron-core {version} is not supported (supported: {', '.join(SUPPORTED_MEGATRON)})" in said
    assert f"Install megatron-core=={SUPPORTED_MEGATRON[-1]}" in said
    assert f"{UNSUPPORTED_MEGATRON_VARIABLE}=1" in said


def test_the_variable_lets_an_unsupported_version_pass(
    megatron: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron.__version__ = "0.99.0"  # type: ignore[attr-defined]
    monkeypatch.setenv(UNSUPPORTED_MEGATRON_VARIABLE, "0")
    assert "0.99.0" in refused(check_version)
    monkeypatch.setenv(UNSUPPORTED_MEGATRON_VARIABLE, "1")
    check_version()


def test_an_absent_megatron_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)
    said = refused(check_version)
    assert "megatron-core is not installed" in said
    assert f"Install megatron-core=={SUPPORTED_MEGATRON[-1]}" in said
