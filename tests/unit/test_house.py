"""The house: who may import what, and how long a file may be. Read from the sources; nothing is imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "optimus_cc_ext"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
MOST_LINES = 450

MEGATRON_AT_ONCE = ("pretrain_gpt.py",)
"""Imported by those only who are about to use Megatron."""

MEGATRON_WHEN_CALLED = ("hooks/", "cpu_runtime/", "doctor/", "startup.py", "data/prepare.py")
"""Inside of functions only: the CPU runtime has to be there before Megatron, and a help text needs none."""


@dataclass(frozen=True)
class Import:
    """One imported module or name, or a module's name given to importlib."""

    module: str
    line: int
    in_function: bool


def imports(source: str) -> list[Import]:
    return list(_imports(ast.parse(source), in_function=False))


def _imports(node: ast.AST, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(f"{child.module}.{alias.name}", child.lineno, in_function) for alias in child.names)
        elif isinstance(child, ast.Call) and _is_import(child.func):
            yield Import(ast.unparse(child.args[0]).strip("'"), child.lineno, in_function)
        yield from _imports(child, in_function or isinstance(child, ast.FunctionDef | ast.Lambda))


def _is_import(function: ast.expr) -> bool:
    return ast.unparse(function).split(".")[-1] in ("import_module", "__import__")


def is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_the_check_sees_every_way_of_importing() -> None:
    found = imports(
        "import megatron.core\n"
        "from megatron import core\n"
        "importlib.import_module('megatron.core')\n"
        "def later():\n"
        "    from megatron.core import mpu\n"
    )
    assert [(item.module, item.line, item.in_function) for item in found] == [
        ("megatron.core", 1, False),
        ("megatron.core", 2, False),
        ("megatron.core", 3, False),
        ("megatron.core.mpu", 5, True),
    ]


def test_megatron_is_imported_only_where_it_is_at_home() -> None:
    guests = [
        f"{name}:{item.line} imports {item.module}"
        for name, path in SOURCES.items()
        for item in imports(path.read_text())
        if is_of(item.module, "megatron")
        and name not in MEGATRON_AT_ONCE
        and not (item.in_function and name.startswith(MEGATRON_WHEN_CALLED))
    ]
    assert guests == []


def in_folder(folder: str) -> Iterator[tuple[str, Import]]:
    for name, path in SOURCES.items():
        if name.startswith(folder):
            yield from ((f"{name}:{item.line}", item) for item in imports(path.read_text()))


def test_compressors_know_tensors_and_nothing_else() -> None:
    for name, path in SOURCES.items():
        if name.startswith("compressors/"):
            nodes = ast.walk(ast.parse(path.read_text()))
            assert "torch.distributed" not in [
                ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)
            ], name
    for where, item in in_folder("compressors/"):
        assert not is_of(item.module, "torch.distributed"), where
        assert is_of(item.module, "optimus_cc_ext.compressors") or not is_of(item.module, "optimus_cc_ext"), where


def test_techniques_know_neither_the_hooks_nor_the_session() -> None:
    for where, item in in_folder("techniques/"):
        assert not is_of(item.module, "optimus_cc_ext.hooks"), where
        assert not is_of(item.module, "optimus_cc_ext.session"), where


def test_no_file_is_too_long() -> None:
    files = [*SOURCES.values(), *(ROOT / "tests").rglob("*.py")]
    lengths = {path.name: path.read_text().count("\n") for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_module_says_what_it_is_and_what_it_offers() -> None:
    for name, path in SOURCES.items():
        body = ast.parse(path.read_text())
        assert name == "_version.py" or ast.get_docstring(body), f"{name} has no docstring"
        offered = [node for node in body.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        assigned = [ast.unparse(node.targets[0]) for node in body.body if isinstance(node, ast.Assign)]
        if any(not node.name.startswith("_") for node in offered):
            assert "__all__" in assigned, f"{name} has public names and no __all__"


def test_every_hook_names_the_megatron_file_that_it_wraps() -> None:
    """A reader who knows Megatron's file finds ours by its name."""
    for name, path in SOURCES.items():
        if name.startswith("hooks/") and path.stem not in ("__init__", "installation", "registry"):
            assert f"/{path.name}" in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0], name
