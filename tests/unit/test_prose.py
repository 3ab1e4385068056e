"""Guard of the one language rule of CONTRIBUTING.md that a program can check: the first word of docstrings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("optimus_cc_ext", "scripts", "tests")
CLIPPED = {"Of", "What", "Where", "Whether", "Those", "By"}
"""Opening words of a genitive or a free relative clause, which stands for a noun that the sentence does not give."""


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of each docstring in `source`, the strings below attributes included."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, (re.findall(r"\w+", value.value) or [""])[0]


def test_the_guard_sees_strings_below_attributes_and_functions_in_functions() -> None:
    source = '"""Of one."""\nx = 1\n"""What two."""\ndef f():\n    def g():\n        """By three."""\n'
    assert sorted(openings(source)) == [(1, "Of"), (3, "What"), (6, "By")]


def test_no_docstring_begins_with_a_clause_that_stands_for_its_noun() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    clipped = [
        f"{name}:{line} {word}"
        for name, path in sorted(files.items())
        for line, word in openings(path.read_text())
        if word in CLIPPED
    ]
    assert clipped == []
