"""Attributes that are replaced or wrapped, and restored: of modules, classes and single objects."""

import os
import types
from collections.abc import Callable
from typing import Any

import pytest

from optimus_cc_ext.patching import Patches


class Base:
    def inherited(self, number: int) -> int:
        return number

    @staticmethod
    def static(number: int) -> int:
        return number


class Derived(Base):
    def own(self, number: int) -> int:
        return 10 * number


def doubled(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    return 2 * original(*args, **kwargs)


@pytest.fixture(autouse=True)
def classes_stay_as_they_are() -> Any:
    before = [dict(vars(each)) for each in (Base, Derived)]
    yield
    assert [dict(vars(each)) for each in (Base, Derived)] == before


def test_a_wrap_gets_the_original_and_is_called_in_its_place() -> None:
    with Patches() as patches:
        for name in ("own", "inherited", "static"):
            patches.wrap(Derived, name, doubled)
        assert [Derived().own(1), Derived().inherited(number=1), Derived().static(1), Derived.static(1)] == [
            20,
            2,
            2,
            2,
        ]
        assert Derived.own.__name__ == "own" and Base().inherited(1) == 1
        assert patches.has_replaced(Derived, "static") and not patches.has_replaced(Base, "static")
    assert "inherited" not in vars(Derived), "what a class inherits is not left behind as its own"


def test_one_object_is_wrapped_and_others_of_its_class_are_not() -> None:
    mine, other = Derived(), Derived()
    with Patches() as patches:
        patches.wrap(mine, "own", doubled)
        assert (mine.own(1), other.own(1)) == (20, 10)
    assert mine.own(1) == 10 and vars(mine) == {}


def test_wraps_of_one_attribute_are_taken_off_in_reverse() -> None:
    module = types.SimpleNamespace(function=lambda number: number)
    first, patches = module.function, Patches()
    for factor in (3, 5):
        patches.replace(module, "function", lambda number, factor=factor, below=module.function: factor * below(number))
    patches.replace(module, "absent", 1)
    assert module.function(1) == 15
    patches.close()
    assert vars(module) == {"function": first}


def test_what_somebody_else_wrapped_again_is_left_alone() -> None:
    module = types.SimpleNamespace(function=lambda number: number, other=1, gone=1)
    with Patches() as patches:
        patches.wrap(module, "function", doubled)
        patches.replace(module, "other", 2)
        patches.replace(module, "gone", 2)
        ours = module.function
        theirs = module.function = lambda number: 7 * ours(number)
        del module.gone
    assert vars(module) == {"function": theirs, "other": 1} and module.function(1) == 14


def test_what_fails_half_way_is_undone_unless_it_was_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "before")
    monkeypatch.delenv("UNSET", raising=False)

    def replaced() -> tuple[int, str | None, str | None]:
        return module.value, os.environ.get("SET"), os.environ.get("UNSET")

    module = types.SimpleNamespace(value=1)
    kept = []
    for fails in (True, False):
        try:
            with Patches() as patches:
                patches.replace(module, "value", 2)
                patches.setenv("SET", "new")
                patches.setenv("UNSET", "new")
                assert 1 // (not fails)
                kept.append(patches.pop_all())
        except ZeroDivisionError:
            assert fails
        assert replaced() == ((1, "before", None) if fails else (2, "new", "new"))
    kept[0].close()
    assert replaced() == (1, "before", None)
