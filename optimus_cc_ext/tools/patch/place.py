"""Place of the block in an entry script: ahead of the first statement that imports Megatron, directly or not.

The script and the modules that it imports are parsed, but never run or imported.
"""

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from optimus_cc_ext.errors import OptimusError


@dataclass
class Imports:
    """Folders in which the imports of a script are looked for, as far as they are known without running the script.

    Attributes:
        ahead: folders that Python searches before those of installed packages: what the script puts in by
            `sys.path.insert`, the script's own folder, and PYTHONPATH.
        behind: folders that Python searches last: `sys.path.append`.
        above: the nearest folder above the script that holds megatron/. Python does not search it by itself.
        unread: sentences about `sys.path` lines whose folder only a run of the script tells.
        late: folders with a megatron/ that come into `sys.path` only behind the place of the block; with a sentence.
    """

    ahead: list[Path]
    behind: list[Path]
    above: list[Path]
    unread: list[str] = field(default_factory=list)
    late: dict[Path, str] = field(default_factory=dict)
    _before: set[Path] = field(default_factory=set)
    _ways: dict[Path, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, script: Path) -> "Imports":
        above = script.resolve().parents
        named = [Path(name) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
        return cls([above[0], *named], [], [folder for folder in above if (folder / "megatron").is_dir()][:1])

    @property
    def at_block(self) -> tuple[list[Path], list[Path]]:
        """Folders ahead and behind, as far as they are in `sys.path` when the block runs."""
        return [f for f in self.ahead if f not in self.late], [f for f in self.behind if f not in self.late]

    def first(self, tree: ast.Module, file: Path, until: int | None = None) -> tuple[int, int, list[str]] | None:
        """Return the first import of a file that leads to Megatron: the index of the statement of the module that
        contains it, its line, and the modules on the way; None if the first `until` statements have none.
        """
        texts = {"__file__": str(file.absolute())}
        for index, statement in enumerate(tree.body[:until]):
            self._before = {*self.ahead, *self.behind}
            self.late.clear()
            if found := self._lead(statement, texts, file):
                return index, *found
        return None

    def _lead(self, statement: ast.stmt, texts: dict[str, str], file: Path) -> tuple[int, list[str]] | None:
        """Return the line of the first import of a statement that leads to Megatron, and the modules on the way."""
        found = None
        for node in _run_by_import(statement):
            self._follow_path(node, texts, file)
            for module, folders in [] if found else _modules(node, file):
                if way := not found and self._way(module, folders):
                    found = getattr(node, "lineno", statement.lineno), way
        return found

    def _way(self, module: str, folders: list[Path]) -> list[str]:
        """Return the modules on the way from this one to Megatron; empty: it does not lead there.

        Args:
            folders: the only folders to look for it in; empty: where Python looks.
        """
        if not folders and module.partition(".")[0] == "megatron":
            return [module]
        for folder in folders or ([] if module in sys.builtin_module_names else self.ahead + self.behind + self.above):
            for ending in ("/__init__.py", ".py"):
                if (file := folder / (module.replace(".", "/") + ending)).is_file():
                    return self._way_of(module, file)
        return []

    def _way_of(self, module: str, file: Path) -> list[str]:
        if file not in self._ways:
            self._ways[file] = []  # for modules that import each other
            try:
                texts = {"__file__": str(file.absolute())}
                leads = (self._lead(each, texts, file) for each in parse(file.read_bytes(), file).body)
                found = next(filter(None, leads), None)
            except (OptimusError, OSError, RecursionError):
                found = None
            self._ways[file] = [module, *found[1]] if found else []
        return self._ways[file]

    def _follow_path(self, node: ast.AST, texts: dict[str, str], file: Path) -> None:
        """Look where the script's `sys.path` lines make Python look, if they can be read without running them."""
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                texts[name] = _path(value, texts)
                return
            case ast.Call(ast.Attribute(changed, "insert" | "append"), [*_, value]):
                added = [value]
            case ast.Call(ast.Attribute(changed, "extend"), [value]) | ast.AugAssign(changed, value=value):
                added = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            case ast.Assign(targets=[changed], value=value):
                added = [value]
            case _:
                return
        if not ast.unparse(changed).startswith("sys.path"):
            return
        searched = self.ahead if ast.unparse(node).startswith("sys.path.insert") else self.behind
        for each in added:
            if path := _path(each, texts):
                searched.insert(0, folder := Path(path))
                if folder not in self._before and (folder / "megatron").is_dir():
                    self.late[folder] = (
                        f"{file}: line {node.lineno} puts {path} into sys.path behind the block. If Megatron is to "
                        f"come from there, start with PYTHONPATH={path}"
                    )
            else:
                self.unread.append(
                    f"{file}: line {node.lineno} puts `{ast.unparse(each)[:60]}` into sys.path, which is unknown here, "
                    "so imports from there are not followed. If that reads a variable, set it as the run does"
                )


def parse(source: bytes, file: Path) -> ast.Module:
    """Parse a source.

    Raises:
        OptimusError: it is not Python; the message names the line.
    """
    try:
        compile(source, str(file), "exec", dont_inherit=True)  # In contrast to ast.parse it checks `__future__`, too.
        return ast.parse(source, str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
        raise OptimusError(
            f"{file} cannot be read as {version} ({line}{getattr(error, 'msg', error)}). Give the script that torchrun "
            "starts, as its own Python reads it"
        ) from None


def find_place(source: bytes, file: Path, imports: Imports) -> tuple[int, str]:
    """Return the number of the line above which the block is inserted, and the reason in words.

    Raises:
        OptimusError: there is no such line; the message says why, and what to do.
    """
    body = (tree := parse(source, file)).body
    if found := imports.first(tree, file):
        target, reason = found[0], f"ahead of the import {' > '.join(found[2])}"
    else:
        guards = [i for i, each in enumerate(body) if isinstance(each, ast.If) and "__name__" in ast.unparse(each.test)]
        if not guards:
            raise OptimusError(
                f"{file}: nothing that its module level imports leads to Megatron, and it has no main guard, so the "
                f"block has no place in it. Without a patch: torchrun ... -m optimus_cc_ext {file} ..."
            )
        target, reason = guards[0], "ahead of the main guard, above which no import leads to Megatron"
    first = target
    while first and body[first - 1].end_lineno == body[first].lineno:
        first -= 1
    for passed in body[first:target]:
        text = ast.unparse(passed)
        if "sys.path" in text or "__future__" in text or (passed is body[0] and ast.get_docstring(tree)):
            raise OptimusError(
                f"{file}: the block has to go between `{text[:60]}` and the import of Megatron, which are both in line "
                f"{body[target].lineno}. Put them on lines of their own"
            )
    return body[first].lineno, reason


def _run_by_import(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that run when its module is imported, in the order of the text."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        never = node.body if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") else []
        waiting += [child for child in ast.iter_child_nodes(node) if child not in never][::-1]


def _modules(node: ast.AST, file: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield the modules that a node imports, and the packages that contain them; for relative imports, with the folder
    that they start from.
    """
    modules, folders = [], []
    match node:
        case ast.Import(aliases):
            modules = [alias.name for alias in aliases]
        case ast.ImportFrom(module, aliases, level):
            modules = [".".join(filter(None, [module, alias.name])) for alias in aliases]
            folders = [file.parents[level - 1]] if level else []
        case ast.Call(called, [ast.Constant(str(module)), *_]) if "import" in ast.unparse(called):
            modules = [module]
    for module in modules:
        parts = module.split(".")
        yield from ((".".join(parts[:count]), folders) for count in range(len(parts), 0, -1))


def _path(node: ast.expr, texts: dict[str, str]) -> str:
    """Return the path that an expression of literals, `__file__`, set variables and functions of paths
    stands for; empty: unknown."""

    def value(node: ast.expr) -> str:
        match node:
            case ast.Constant(str(text)):
                return text
            case ast.Name(name) if texts.get(name):
                return texts[name]
            case ast.Subscript(of, ast.Constant(str(name))) if ast.unparse(of).endswith("environ"):
                return os.environ[name]
            case ast.Call(how, [ast.Constant(str(name)), *default]) if ast.unparse(how).endswith(
                ("environ.get", "getenv")
            ):
                return os.environ.get(name) or value(default[0])
            case ast.Attribute(_, "pardir"):
                return os.pardir
            case ast.Attribute(path, "parent") | ast.Call(ast.Attribute(_, "dirname"), [path]):
                return os.path.dirname(value(path))
            case ast.Subscript(ast.Attribute(path, "parents"), ast.Constant(int(count))):
                return str(Path(value(path)).parents[count])
            case ast.Call(ast.Attribute(_, "join"), parts):
                return os.path.join(*map(value, parts))
            case ast.BinOp(left, ast.Div(), right):
                return os.path.join(value(left), value(right))
            case ast.Call(ast.Name("str" | "Path") | ast.Attribute(_, "Path"), [path]):
                return value(path)
            case ast.Call(ast.Attribute(_, "abspath" | "realpath"), [path]) | ast.Call(
                ast.Attribute(path, "resolve" | "absolute"), []
            ):
                return os.path.abspath(value(path))
        raise LookupError

    try:
        return value(node)
    except LookupError:
        return ""
