"""Rules of the source tree: who may import what, and how long a file may be. The test reads sources and imports
nothing.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "optimus_cc_ext"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
MOST_LINES = 450
TINY = 60
"""Largest number of lines for which a file that only one other file imports counts as tiny."""

MOST_FLOORS = 9
"""Largest number of folders that import each other in a row, with both entry points."""

LONGEST_CHAIN = 24
"""Largest number of files that import each other in a row."""

TOOLS = "tools/"
"""Folder of what training does not need. It imports the extension, and the extension never imports it."""

MEGATRON_AT_ONCE = ("tools/pretrain_gpt.py",)
"""Files that may import Megatron at the top, because only programs that use Megatron import them."""

MEGATRON_WHEN_CALLED = ("hooks/", "tools/cpu/", "tools/doctor/", "startup.py", "tools/data/prepare.py")
"""Places that may import Megatron inside functions: the CPU runtime has to be installed first, and --help needs
none.
"""


@dataclass(frozen=True)
class Import:
    """Imported module or name, or a module's name given to importlib."""

    module: str
    line: int
    in_function: bool
    checked_only: bool = False
    """True below `if TYPE_CHECKING:`, which never runs."""


@cache
def imports(source: str) -> list[Import]:
    tree = ast.parse(source)
    checked = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    lines = {
        node.lineno for each in checked for branch in each.body for node in ast.walk(branch) if hasattr(node, "lineno")
    }
    return [replace(item, checked_only=item.line in lines) for item in _imports(tree, in_function=False)]


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


def test_collectives_know_tensors_and_groups_and_neither_config_nor_session_nor_megatron() -> None:
    """A training loop of any kind can call them, so no file that they import knows more, directly or not."""
    below: dict[str, set[str]] = {name: set() for name in SOURCES}
    for arrow in arrows():
        below[arrow.importer].add(arrow.imported)
    room_itself = {name for name in SOURCES if name.startswith("collectives/")}
    reached = set().union(*(_reachable(name, below) for name in room_itself)) - room_itself
    assert len(room_itself) > 5 and {room(name) for name in reached} == {
        "compressors", "errors.py", "metrics", "patching.py", "slots.py"
    }  # fmt: skip
    assert {name for name in reached if name.startswith("metrics/")} == {"metrics/gauge.py", "metrics/stopwatch.py"}


def test_techniques_know_neither_the_hooks_nor_the_session_that_loops_over_them() -> None:
    for where, item in in_folder("techniques/"):
        assert not is_of(item.module, "optimus_cc_ext.hooks"), where
        assert not is_of(item.module, "optimus_cc_ext.techniques.session"), where


def test_no_file_is_too_long() -> None:
    files = [*SOURCES.values(), *(ROOT / "tests").rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def lines_of_code(source: str) -> int:
    """Return the number of lines without comments, docstrings and blank lines."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type not in skipped]
    code = {line for each in tokens for line in range(each.start[0], each.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def test_the_readme_says_how_many_lines_the_extension_has() -> None:
    count = sum(lines_of_code(path.read_text()) for name, path in SOURCES.items() if not name.startswith(TOOLS))
    print(f"{count} lines of code without {TOOLS}")
    (said,) = re.findall(r"\*\*Size\*\*: ([\d,]+) lines", (ROOT / "README.md").read_text())
    assert int(said.replace(",", "")) == round(count, -2)


REQUIRED = {"megatron", "numpy", "torch", "triton", "optimus_cc_ext"}
"""Packages that are there without any extra; torch brings triton."""


def extras_at_module_level(source: str) -> list[str]:
    """Return the modules that importing a file needs, beside Python's own and `REQUIRED`."""
    return [
        item.module
        for item in imports(source)
        if not (item.in_function or item.checked_only)
        and item.module.partition(".")[0] not in REQUIRED | sys.stdlib_module_names
    ]


def test_an_extra_is_imported_only_when_it_is_needed() -> None:
    assert extras_at_module_level(
        "import os\n"
        "from matplotlib.figure import Figure\n"
        "try:\n    import rich.table\nexcept ImportError:\n    pass\n"
        "if TYPE_CHECKING:\n    from tensorboard import program\n"
        "class Late:\n    import tqdm\n"
        "def later():\n    import tokenizers\n"
    ) == ["matplotlib.figure.Figure", "rich.table", "tqdm"]
    found = {name: extras_at_module_level(path.read_text()) for name, path in SOURCES.items()}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_every_module_says_what_it_is() -> None:
    for name, path in SOURCES.items():
        assert name == "_version.py" or ast.get_docstring(ast.parse(path.read_text())), f"{name} has no docstring"


NO_FILE_OF_MEGATRONS = (
    "__init__",
    "attaching",
    "facts",
    "handle",
    "launching",
    "parts",
    "registry",
    "sessions",
    "steps",
)


def test_every_hook_names_the_megatron_file_that_it_wraps() -> None:
    """A reader who knows Megatron's file finds our hook by the file's name."""
    for name, path in SOURCES.items():
        if name.startswith("hooks/") and path.stem not in NO_FILE_OF_MEGATRONS:
            assert f"/{path.name}" in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0], name


FACE = "optimus_cc_ext"
MODULES = {
    f"{FACE}.{name.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"): name for name in SOURCES
} | {FACE: "__init__.py"}
"""File by the name that it is imported by."""


@dataclass(frozen=True)
class Arrow:
    """Import from one file of the package to another."""

    importer: str
    line: int
    imported: str

    @property
    def rooms(self) -> tuple[str, str]:
        return room(self.importer), room(self.imported)

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def room(name: str) -> str:
    """Return the folder of a file, or the file itself if it lies directly in the package or in tools/."""
    above = TOOLS if name.startswith(TOOLS) else ""
    return above + name.removeprefix(above).partition("/")[0]


@cache
def arrows() -> list[Arrow]:
    """Return all imports between files of the package, also those inside functions and under TYPE_CHECKING."""
    return [
        Arrow(name, item.line, MODULES[module])
        for name, path in SOURCES.items()
        for item in imports(path.read_text())
        if is_of(item.module, FACE)
        for module in [item.module if item.module in MODULES else item.module.rpartition(".")[0]]
        if module in MODULES and MODULES[module] != name
    ]


def floors(pairs: Iterable[tuple[str, str]]) -> tuple[dict[str, int], list[set[str]]]:
    """Return each node's floor, 1 or one above the highest floor that it imports, and all circles.

    The nodes of a circle share one floor.
    """
    below: dict[str, set[str]] = {}
    for importer, imported in pairs:
        below.setdefault(importer, set()).add(imported)
        below.setdefault(imported, set())
    reached = {node: _reachable(node, below) for node in below}
    circles = {node: {other for other in reached[node] if node in reached[other]} for node in below}
    found: dict[str, int] = {}
    # Nodes that reach fewer others come first: all nodes that a node imports, outside its circle, reach fewer than it
    # does.
    for node in sorted(below, key=lambda node: len(reached[node] | {node})):
        together = circles[node] or {node}
        imported = set().union(*(below[each] for each in together)) - together
        found[node] = 1 + max((found[other] for other in imported), default=0)
    distinct = {frozenset(circle) for circle in circles.values() if circle}
    return found, sorted(map(set, distinct), key=sorted)


def _reachable(start: str, below: Mapping[str, set[str]]) -> set[str]:
    """Return all nodes that `start` imports, directly or not; `start` itself only if it lies on a circle."""
    found: set[str] = set()
    waiting = [*below[start]]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += below[node]
    return found


def test_floors_are_counted_as_they_are_said_to_be() -> None:
    found, circles = floors([("top", "a"), ("top", "b"), ("a", "b"), ("b", "base")])
    assert found == {"top": 4, "a": 3, "b": 2, "base": 1} and circles == []
    found, circles = floors([("top", "a"), ("a", "b"), ("b", "a"), ("b", "base")])
    assert found == {"top": 3, "a": 2, "b": 2, "base": 1} and circles == [{"a", "b"}]


def test_the_house_is_low_and_nothing_imports_upwards() -> None:
    between_rooms = [arrow for arrow in arrows() if arrow.rooms[0] != arrow.rooms[1]]
    found, circles = floors(arrow.rooms for arrow in between_rooms)
    files, circles_of_files = floors((arrow.importer, arrow.imported) for arrow in arrows())
    for floor in range(max(found.values()), 0, -1):
        print(f"{floor:2}  {', '.join(sorted(name for name in found if found[name] == floor))}")
    print(f"longest chain of files: {max(files.values())}")
    for circle in circles:
        print("circle:", *(str(arrow) for arrow in between_rooms if set(arrow.rooms) <= circle), sep="\n    ")
    assert circles == [] and circles_of_files == [], "these import each other; see above"
    assert max(found.values()) <= MOST_FLOORS
    assert max(files.values()) <= LONGEST_CHAIN


def test_nothing_inside_imports_the_face_of_the_package() -> None:
    """The face, `optimus_cc_ext/__init__.py`, imports all that a training loop calls, even for a single name."""
    found = {
        f"{name}:{node.lineno}"
        for name, path in SOURCES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and node.module == FACE)
        or (isinstance(node, ast.Import) and FACE in [alias.name for alias in node.names])
    }
    assert found == set()


def test_the_extension_stands_without_the_tools() -> None:
    inside, outside = ({name for name in SOURCES if name.startswith(TOOLS) is way} for way in (False, True))
    assert len(inside) > 50 and len(outside) > 30
    assert [str(arrow) for arrow in arrows() if arrow.importer in inside and arrow.imported in outside] == []


def test_a_file_that_serves_one_other_is_not_tiny() -> None:
    """A tiny file belongs into the file that imports it, unless the two would be long together, or Megatron's file
    gives a hook its name.
    """
    importers: dict[str, set[str]] = {}
    for arrow in arrows():
        importers.setdefault(arrow.imported, set()).add(arrow.importer)
    lines = {name: path.read_text().count("\n") for name, path in SOURCES.items()}
    tiny = {
        f"{name} ({lines[name]} lines, for {importer} of {lines[importer]})"
        for name, (importer, *others) in importers.items()
        if not others
        and lines[name] < TINY
        and not name.endswith(("__init__.py", "__main__.py", "_version.py"))
        and not importer.endswith("__init__.py")
        and not name.startswith("hooks/")
        and lines[name] + lines[importer] <= 400
    }
    assert tiny == set()


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def names_of(nodes: Iterable[ast.AST]) -> set[str]:
    return {name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)}


def of_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield what belongs to a module or a function, but not to functions in it, nor names of its comprehensions."""
    left: list[tuple[ast.AST, frozenset[str]]] = [(scope, frozenset())]
    while left:
        node, bound = left.pop()
        if isinstance(node, COMPREHENSIONS):
            bound |= names_of(each.target for each in node.generators)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, SCOPES) and not (isinstance(child, ast.Name) and child.id in bound):
                yield child
                left.append((child, bound))


def read_after_their_for(source: str) -> list[tuple[int, str]]:
    """Return the names that a `for` binds and that something below it reads before anything else binds them."""
    found = []
    for scope in ast.walk(ast.parse(source)):
        nodes = list(of_scope(scope)) if isinstance(scope, (ast.Module, *SCOPES)) else []
        names = [node for node in nodes if isinstance(node, ast.Name)]
        for loop in (node for node in nodes if isinstance(node, ast.For | ast.AsyncFor)):
            for name in names_of([loop.target]):
                below = [each for each in names if each.id == name and each.lineno > (loop.end_lineno or 0)]
                # In one line, such as that of a second loop over the same name, what binds the name comes first.
                first = min(below, key=lambda each: (each.lineno, isinstance(each.ctx, ast.Load)), default=None)
                if first is not None and isinstance(first.ctx, ast.Load):
                    found.append((first.lineno, name))
    return sorted(found)


def test_the_check_sees_names_that_are_read_after_their_for() -> None:
    assert read_after_their_for("for a, b in c:\n    a\nprint(a)\nb = 1\nprint(b)") == [(3, "a")]
    assert read_after_their_for("def f():\n    for a in b:\n        pass\n    return [a for a in b], a") == [(4, "a")]
    assert read_after_their_for("for a in b:\n    pass\nfor a in b:\n    a\ndef f(a):\n    return a") == []


def test_no_name_of_a_for_is_read_after_it() -> None:
    """After a loop, its variable holds the value of the last iteration, which is rarely what the code means."""
    folders = ("optimus_cc_ext", "scripts", "tests")
    sources = {path: path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}
    found = {
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, source in sources.items()
        for line, name in read_after_their_for(source)
    }
    assert found == set()
