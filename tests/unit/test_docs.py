"""The documents name every flag and every refusal, and only files and modules that exist."""

import ast
import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.config.refusals import REFUSALS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "patches/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MOST_WORDS = {
    "README.md": 899,
    "CONTRIBUTING.md": 1208,
    "docs/alternatives.md": 1019,
    "docs/api.md": 1837,
    "docs/cluster.md": 2174,
    "docs/compatibility.md": 2805,
    "docs/custom-loops.md": 867,
    "docs/does-it-help.md": 4030,
    "docs/evaluation.md": 833,
    "docs/extending.md": 696,
    "docs/flags.md": 3901,
    "docs/glossary.md": 632,
    "docs/gpu.md": 1837,
    "docs/how-it-works.md": 3002,
    "docs/megatron-bridge.md": 265,
    "docs/migration.md": 589,
    "docs/performance.md": 485,
    "docs/reproducing.md": 900,
    "docs/slow-links.md": 1409,
    "docs/study-prototypes.md": 5314,
    "docs/study.md": 2316,
    "docs/troubleshooting.md": 1870,
    "docs/upgrade.md": 989,
}
"""Most words of each page, by `wc -w`. A change that adds to a page takes as much away."""

NAMED_AS_GONE = "docs/upgrade.md"
"""Page that may name things that are gone, because it says what replaces them."""

FLAGS = ["--" + f.name.replace("_", "-") for f in fields(OptimusConfig) if f.metadata["help"]]


def test_every_flag_is_explained() -> None:
    table, _, guide = (ROOT / "docs" / "flags.md").read_text().partition("\n## ")
    assert [flag for flag in FLAGS if flag not in table] == []
    left_to_the_table = {"--compression-seed"}
    assert [flag for flag in FLAGS if flag not in guide and flag not in left_to_the_table] == []


def test_no_page_has_more_words_than_its_budget() -> None:
    pages = ["README.md", "CONTRIBUTING.md", *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    words = {page: len((ROOT / page).read_text().split()) for page in pages}
    assert set(words) == set(MOST_WORDS)
    assert {page: count for page, count in words.items() if count > MOST_WORDS[page]} == {}


def test_the_readme_is_short_and_leaves_flags_to_their_page() -> None:
    readme = (ROOT / "README.md").read_text()
    lines = readme.splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 120 and len(readme.split()) <= 900
    assert [flag for flag in FLAGS if f"| `{flag} " in readme] == [], "two tables would have to be kept equal"
    assert len((ROOT / "docs" / "performance.md").read_text().splitlines()) <= 100


def test_every_refusal_has_its_cure_in_troubleshooting() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [refusal.flag for refusal in REFUSALS if f"`{refusal.flag}" not in text] == []


def find_module(name: str) -> bool:
    """Tell if the package has this module."""
    return (ROOT / "optimus_cc_ext" / f"{name.replace('.', '/')}.py").exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_modules_files_and_commands_lead_to_what_exists(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []
    folders = "config|hooks|techniques|compressors|devices|forecast|checkpoint|metrics"
    modules = re.findall(rf"`((?:{folders})/\w+\.py)`", text)
    assert [name for name in modules if not (ROOT / "optimus_cc_ext" / name).exists()] == []
    files = re.findall(r"(?<![\w/*.-])((?:scripts|tests|patches)/[\w./-]*\w)/?(?![\w/*{<-])", text)
    commands = re.findall(r"python -m ((?:scripts|optimus_cc_ext)[\w.]*\w)", text)
    if document.relative_to(ROOT).as_posix() == NAMED_AS_GONE:
        lines = [line.split("|")[-2] for line in text.splitlines() if line.startswith("|")]
        moved = re.findall(r"`([a-z]+\.[a-z_]+)`", text.partition("## Modules")[2])
        now = [name for name in moved if f"`{name}`" in "\n".join(lines)]
        functions = {"errors.run_command"}
        assert [name for name in now if name not in functions and not find_module(name)] == []
        files, commands = [], re.findall(r"python -m ([\w.]+\w)", "\n".join(lines))
    assert [name for name in files if not (ROOT / name).exists()] == []
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert [name for name in re.findall(r"`(test_\w+)`", text) if name not in tests] == []
    assert [name for name in commands if importlib.util.find_spec(name) is None] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page, and those that the page sets itself."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {*slugs, *re.findall(r"""(?:id|name)=["']([^"']+)""", text)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_a_section_lead_to_its_heading(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", document.read_text())
    dead = [
        f"{page}#{anchor}"
        for page, anchor in links
        if "://" not in page and anchor not in anchors(document.parent / page if page else document)
    ]
    assert dead == [] or document.name == "api.md", "griffe2md's anchors keep the dots that GitHub removes"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_row_of_a_table_has_as_many_cells_as_its_header(document: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, *rows = table.splitlines()
        cells = len(re.findall(r"(?<!\\)\|", header))  # a bar ends a table cell even inside code, unless it is escaped
        assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != cells] == []


def test_messages_that_the_pages_quote_are_those_of_the_code() -> None:
    troubleshooting, gpu = ((ROOT / "docs" / name).read_text() for name in ("troubleshooting.md", "gpu.md"))
    causes = "\n".join(line for line in troubleshooting.splitlines() if not line.startswith("|"))
    quoted = re.findall(r"^(?:- \*\*)?`([^`]{15,})`", causes, re.MULTILINE)
    quoted += re.findall(r"^\| (.+?) \|", gpu.partition("| message | cure |")[2].partition("\n\n")[0], re.MULTILINE)
    assert len(quoted) >= 10
    said = set()
    for path in (ROOT / "optimus_cc_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            said |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    for message in quoted:
        # Values of a quoted message are digits, capitals or dots on the page, and expressions of an f-string in the
        # code.
        parts = [part for part in re.split(r"\.\.\.|[\d.]*\d|\b[A-Z]+\b|\[", message) if len(part) > 8]
        others = message.startswith(("Watchdog", "OPTIMUS_CC_"))  # these are messages of PyTorch and names of variables
        assert others or [part for part in parts if not any(part.strip() in text for text in said)] == [], message
