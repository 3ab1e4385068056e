"""The table of attributes that are read of Megatron's objects: complete, without idle rows, checked as seams are."""

import argparse
import ast
import functools
import importlib.machinery
import inspect
import logging
import os
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_cc_ext.errors import UnsupportedMegatron
from optimus_cc_ext.hooks import parts
from optimus_cc_ext.hooks.parts import ATTRIBUTES, lacking
from optimus_cc_ext.hooks.registry import TESTED, UNSUPPORTED_MEGATRON_VARIABLE

PACKAGE = Path(parts.__file__).parents[1]


def reads_nothing() -> None:
    """Stand in for any function."""


OTHERS = (
    torch, torch.Tensor, torch.nn, torch.nn.Module, torch.distributed, torch.distributed.distributed_c10d,
    torch.distributed.ProcessGroup, torch.distributed.Store, torch.cuda,
    torch._C, torch.optim, torch.optim.Optimizer, str, dict, list, argparse, argparse.ArgumentParser("x"),
    argparse.HelpFormatter("x"), functools, importlib, inspect, inspect.Signature, inspect.BoundArguments,
    inspect.Parameter, logging, os, os.path, sys, time, Path, Exception, SystemExit(1), reads_nothing, types,
    importlib.machinery.ModuleSpec("x", None),
)  # fmt: skip
"""Objects of torch and Python, whose attributes are none of Megatron's."""

NOT_CHECKED = {
    "code", "find_spec", "from_iterable", "fullmatch", "get_close_matches", "environ", "enter_context", "callback",
    "add_scalar", "add_text", "finalize_fns", "main",
}  # fmt: skip
"""Attributes of Python's and of TensorBoard's, and one of a request whose class is in another package since 0.19."""


def trees(folder: Path) -> Iterator[ast.Module]:
    return (ast.parse(file.read_text()) for file in sorted(folder.rglob("*.py")) if file.name != "parts.py")


def defined_here() -> set[str]:
    """Return the names of everything that the package defines: functions, classes, fields and attributes."""
    names: set[str] = set()
    for node in (node for tree in trees(PACKAGE) for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                names.add(name)
    return names


def reads() -> dict[str, str]:
    """Return the attributes and names that the hooks read of objects that may be Megatron's, with the expression."""
    ours = defined_here() | {name for each in OTHERS for name in dir(each)} | NOT_CHECKED
    found = {}
    for node in (node for tree in trees(PACKAGE / "hooks") for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr not in ours:
            found[node.attr] = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron."):
            owners = {owner.replace(":", ".") for owner in ATTRIBUTES}
            named = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in owners}
            found |= dict.fromkeys(named, ast.unparse(node))
    return found


def test_every_attribute_that_the_hooks_read_is_in_the_table() -> None:
    known = {name for names in ATTRIBUTES.values() for name in names}
    assert {name: where for name, where in reads().items() if name not in known} == {}


def test_every_attribute_in_the_table_is_read() -> None:
    text = "".join(file.read_text() for file in PACKAGE.rglob("*.py") if file.name != "parts.py")
    assert [name for names in ATTRIBUTES.values() for name in names if name not in text] == []


@dataclass
class Settings:
    """Stand-in for a configuration of Megatron's."""

    size: int
    shape: tuple[int, ...] = ()


class Inner:
    """Stand-in for a class of Megatron's."""

    def __init__(self) -> None:
        self.late: int = 1
        self.first, self.second = 2, 3
        # fmt: off
        (
            self.third,
            self.fourth,
        ) = 4, 5
        # fmt: on


class Outer(Inner):
    """Stand-in for a class of Megatron's that inherits attributes."""

    @property
    def computed(self) -> int:
        return self.late

    def mark(self, parameter: Any) -> None:
        parameter.marked = True


@pytest.mark.parametrize(
    ("owner", "names", "missing"),
    [
        ("Settings", ("size", "shape", "gone"), ["gone"]),
        ("Outer", ("late", "first", "second", "third", "fourth", "computed", "mark", "gone", "read"), ["gone", "read"]),
        ("", ("Settings", "marked", "gone"), ["gone"]),
    ],
)
def test_an_attribute_is_found_wherever_its_class_sets_it(
    owner: str, names: tuple[str, ...], missing: list[str]
) -> None:
    assert lacking(f"{__name__}:{owner}" if owner else __name__, names) == missing


def versioned(monkeypatch: pytest.MonkeyPatch, version: str, **broken: str) -> None:
    monkeypatch.setattr(parts, "megatron_version", lambda: version)
    found = {"seam a": None, "seam b": None} | broken
    monkeypatch.setattr(parts, "parts_of", lambda *_: found)


def test_a_version_between_two_that_were_tested_trains_with_one_line_if_all_parts_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(UNSUPPORTED_MEGATRON_VARIABLE, raising=False)
    for version in TESTED:
        versioned(monkeypatch, version)
        assert parts.check_megatron([]) is None
    versioned(monkeypatch, "0.18.0")
    said = parts.check_megatron([])
    assert said is not None and said.startswith("megatron-core 0.18.0 was not tested (tested: 0.16.0rc0, ")
    versioned(monkeypatch, "0.18.0", attribute="megatron-core 0.18.0: x:Y has no z. Install it")
    with pytest.raises(UnsupportedMegatron, match=r"^megatron-core 0.18.0: x:Y has no z\. Install it$"):
        parts.check_megatron([])


@pytest.mark.parametrize("version", ["0.14.0", "0.15.0rc3", "0.20.1", "0.99.0"])
def test_a_version_outside_of_those_tested_is_refused_with_what_holds_unless_the_variable_lets_it_pass(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv(UNSUPPORTED_MEGATRON_VARIABLE, "0")
    versioned(monkeypatch, version, attribute="x:Y has no z")
    with pytest.raises(UnsupportedMegatron) as caught:
        parts.check_megatron([])
    said = str(caught.value)
    assert said.startswith(f"megatron-core {version} is not supported (tested: 0.16.0rc0, ")
    assert "2 of the 3 functions and attributes that Optimus-CC needs hold there. Install megatron-core==0.19.2" in said
    assert said.endswith(f"or set {UNSUPPORTED_MEGATRON_VARIABLE}=1 to try it untested")
    monkeypatch.setenv(UNSUPPORTED_MEGATRON_VARIABLE, "1")
    with pytest.raises(UnsupportedMegatron, match=r"^x:Y has no z$"):
        parts.check_megatron([])
    versioned(monkeypatch, version)
    assert str(parts.check_megatron([])).startswith(f"megatron-core {version} was not tested")
