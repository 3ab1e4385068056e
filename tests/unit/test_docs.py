"""The pages are short, name every flag and every refusal, and only files, modules and sections that exist."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimus_cc_ext.config.refusals import REFUSALS
from optimus_cc_ext.hooks.launching import all_seams
from scripts.page_tables import with_tables, without_tables

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = {
    "README.md": 450,
    "docs/start.md": 700,
    "docs/does-it-help.md": 1200,
    "docs/alternatives.md": 800,
    "docs/flags.md": 1400,
    "docs/collectives.md": 400,
    "docs/cluster.md": 1300,
    "docs/python.md": 1300,
    "docs/compatibility.md": 900,
    "docs/troubleshooting.md": 1200,
    "docs/evidence.md": 1500,
    "docs/paper.md": 1000,
    "docs/develop/how-it-works.md": 1800,
    "docs/develop/extending.md": 600,
    "docs/develop/glossary.md": 350,
    "CONTRIBUTING.md": 800,
    "docs/lab/study-prototypes.md": 1400,
}
"""Most words of each page, by `wc -w`, without its generated tables. A change that adds words takes as many away."""

MOST_IN_ALL = 15_700
"""Most words of all pages but those of the laboratory. This number only falls."""

MEAN_SENTENCE, LONGEST_SENTENCE, MOST_QUESTIONS = 20, 40, 5

PAGES = [ROOT / name for name in MOST_WORDS]
DOCUMENTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "patches" / "README.md"]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=named)
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=named)


def without_code(text: str) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


# -- words and sentences ------------------------------------------------------------------------------------------


def test_no_page_has_more_words_than_its_budget() -> None:
    found = {named(page) for page in (ROOT / "docs").rglob("*.md")}
    assert found == {name for name in MOST_WORDS if name.startswith("docs/")}
    words = {name: len(without_tables((ROOT / name).read_text()).split()) for name in MOST_WORDS}
    print(words)
    assert {name: count for name, count in words.items() if count > MOST_WORDS[name]} == {}
    budgets = {name: most for name, most in MOST_WORDS.items() if not name.startswith("docs/lab/")}
    assert sum(budgets.values()) <= MOST_IN_ALL


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page's prose: outside of code, tables and headings."""
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", without_code(without_tables(text)))
    text = re.sub(r"<!--.*?-->", "", text)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if part.lstrip().startswith(("|", "#")):
            continue
        prose = " ".join(line for line in part.splitlines() if not line.lstrip().startswith(("|", "#")))
        prose = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", prose)
        yield from (each for each in re.split(r"(?<=[.?!])[*)`]*\s+(?=[A-Z`*\[(0-9])", prose.strip()) if each)


def test_sentences_end_at_stops_and_at_list_items() -> None:
    text = "# Title\n\nOne two. Three `a.b c` four?\n\n| no | table |\n\n- five: six\n- **seven**. Eight\n"
    assert list(sentences(text)) == ["One two.", "Three `a.b c` four?", "five: six", "**seven**.", "Eight"]


@every_page
def test_sentences_are_short(page: Path) -> None:
    lengths = {each: len(each.split()) for each in sentences(page.read_text())}
    assert [each for each, length in lengths.items() if length > LONGEST_SENTENCE] == []
    assert sum(lengths.values()) / len(lengths) <= MEAN_SENTENCE


@every_page
def test_a_page_begins_with_the_questions_that_it_answers(page: Path) -> None:
    if named(page) == "README.md":
        return  # its headings are the questions
    questions = page.read_text().split("\n\n")[1].splitlines()
    assert 1 <= len(questions) <= MOST_QUESTIONS
    assert [line for line in questions if not re.fullmatch(r"- [A-Z].*\?", line)] == []


# -- what a page must have ----------------------------------------------------------------------------------------


@every_page
def test_generated_tables_are_what_the_code_makes(page: Path) -> None:
    text = page.read_text()
    assert with_tables(text) == text, "run: python -m scripts.page_tables"


def test_flags_and_refusals_have_their_generated_tables() -> None:
    for page, tables in (("flags", {"flags", "classes", "formats"}), ("troubleshooting", {"refusals"})):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        assert set(re.findall(r"<!-- generated: (\S+) -->", text)) == tables
    assert [refusal.flag for refusal in REFUSALS if f"| `{refusal.flag}` |" not in text] == []


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of all table rows of a page."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" *") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_readme_repeats_the_losses_of_the_evidence_and_the_size_of_the_extension() -> None:
    readme, evidence = ((ROOT / name).read_text() for name in ("README.md", "docs/evidence.md"))
    losses = [row for row in rows_of(readme) if len(row) == 4 and row[1].endswith("million")]
    assert len(losses) == 4
    shown, model = [], ""
    for row in rows_of(evidence):
        if len(row) == 7 and row[3] == "`balanced`":
            model = row[0] or model
            shown.append([model, *row[1:]])
        elif len(row) == 7:
            model = row[0] or model
    for name, parameters, runs, loss in losses:
        iterations, seeds = runs.split(", ")
        assert any(
            parameters in row[0] and row[2] == iterations and row[6] == seeds
            and (f"{float(row[4]):+.3f} %" in loss or "undecided" in loss)
            and (not row[5] or "undecided" in loss or row[5] in loss)
            for row in shown
        ), name  # fmt: skip
    (bound,) = re.findall(r"undecided: bound ([\d.]+ %)", readme)
    assert f"the bounds are {bound}" in " ".join(evidence.split())
    assert f"{len(all_seams())} places in Megatron are wrapped" in " ".join(readme.split())


def test_the_readmes_picture_and_set_up_stand_on_the_first_screen() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
    for word in ("./scripts/setup_env.sh", "./scripts/quickstart.sh", "docs/images/coding.svg"):
        assert word in first


# -- what a page names --------------------------------------------------------------------------------------------


@every_document
def test_links_modules_files_and_commands_lead_to_what_exists(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []
    folders = "config|hooks|techniques|compressors|devices|checkpoint|metrics|plan"
    modules = re.findall(rf"`((?:{folders})/\w+\.py)`", text)
    assert [name for name in modules if not (ROOT / "optimus_cc_ext" / name).exists()] == []
    if document.name == "CHANGELOG.md":
        return  # it also names what is gone
    files = re.findall(r"(?<![\w/*.-])((?:scripts|tests|patches)/[\w./-]*\w)/?(?![\w/*{<-])", text)
    assert [name for name in files if not (ROOT / name).exists()] == []
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert [name for name in re.findall(r"`(test_\w+)`", text) if name not in tests] == []
    commands = re.findall(r"python -m ((?:scripts|optimus_cc_ext|tests)[\w.]*\w)", text)
    assert [name for name in commands if importlib.util.find_spec(name) is None] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page, and those that the page sets itself."""
    text = without_code(page.read_text())
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {*slugs, *re.findall(r"""(?:id|name)=["']([^"']+)""", text)}


@every_document
def test_links_to_a_section_lead_to_its_heading(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", document.read_text())
    dead = [
        f"{page}#{anchor}"
        for page, anchor in links
        if "://" not in page and anchor not in anchors(document.parent / page if page else document)
    ]
    assert dead == []


@every_document
def test_each_row_of_a_table_has_as_many_cells_as_its_header(document: Path) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", without_code(document.read_text()), re.MULTILINE):
        header, *rows = table.splitlines()
        cells = len(re.findall(r"(?<!\\)\|", header))  # a bar ends a table cell even inside code, unless it is escaped
        assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != cells] == []


def test_pages_that_code_and_tests_name_exist() -> None:
    dead = []
    for folder, pattern in (("optimus_cc_ext", "*.py"), ("scripts", "*"), ("tests", "*.py"), ("patches", "*")):
        for path in (ROOT / folder).rglob(pattern):
            if not path.is_file() or path.suffix in (".pyc", ".png"):
                continue
            # recipes.py names a page of Megatron-Bridge.
            for page in re.findall(
                r"(?<![\w/])docs/[\w/.-]+\.(?:md|html|csv|svg|png)\b", path.read_text(errors="ignore")
            ):
                if path.name not in ("test_docs.py", "test_packaging.py", "recipes.py") and not (ROOT / page).exists():
                    dead.append(f"{named(path)}: {page}")
    assert dead == []


# -- messages -----------------------------------------------------------------------------------------------------


CURE = r"\. (?:[A-Z][a-z]+ |\.\.\.$)|: (?:end|give|look|unset|use) "
"""The beginning of a cure in a message: a further sentence, or an imperative behind a colon."""

WITH_CURE = {"FlagError", "DamagedState", "MissingExtra", "UnknownName", "UnsupportedMegatron"}
"""Errors whose messages always end with a cure."""

NO_END_OF_A_RUN = {"ValueError", "TypeError", "AttributeError", "SystemExit", "OSError", "ArithmeticError",
                   "NotImplementedError", "NoCpuMeaningError", "RuntimeError"}  # fmt: skip
"""Errors of a caller's program, or errors that another error takes up with its own sentence."""


def literal(node: ast.expr) -> str:
    """Return the text of a message, with `...` for what the program fills in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values)
    return "..."


def ends_of_a_run() -> Iterator[tuple[str, str]]:
    """Yield the error and the message of each `raise` that can end a run, in `compress()` or after it has begun."""
    for folder in ("hooks", "techniques", "checkpoint", "metrics", "tools/cpu"):
        for path in sorted((ROOT / "optimus_cc_ext" / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                call = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Return) else None
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
                    error = call.func.id
                    if re.search(r"Error$|Disagree$|State$|Megatron$|Extra$|Name$", error):
                        yield error, literal(call.args[0])


def test_each_sentence_that_can_end_a_run_stands_in_troubleshooting_or_names_its_cure() -> None:
    page = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().split())
    page = re.sub(r"[:;,]", "", page)
    left_out, missing = 0, []
    for error, message in ends_of_a_run():
        parts = [part.strip(" :;,()") for part in message.split("...")]
        telling = next((part for part in parts if len(part.split()) > 2), "")
        beginning = re.sub(r"[:;,]", "", " ".join(telling.split()[:4]))
        if error in NO_END_OF_A_RUN:
            continue
        if error in WITH_CURE or re.search(CURE, message):
            left_out += 1
        elif beginning and beginning not in page:
            missing.append(message)
    print(f"{left_out} sentences carry their own cure and are left out")
    assert left_out > 20 and missing == []


def test_messages_that_the_page_quotes_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    gpu = page.partition("## Messages about a GPU")[2].partition("## Variables")[0]
    quoted = re.findall(r"^\| `([^`]{12,})`", page.partition("## The run stops")[2], re.MULTILINE)
    quoted += [row[0] for row in rows_of(gpu)[2:]]
    assert len(quoted) >= 12
    said = set()
    for path in (ROOT / "optimus_cc_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            said |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    for message in quoted:
        # Values of a quoted message are digits, capitals or dots on the page, and expressions of an f-string in the
        # code.
        parts = [part for part in re.split(r"\.\.\.|[\d.]*\d|\b[A-Z]+\b|\[", message) if len(part) > 8]
        others = message.startswith(("Watchdog", "OPTIMUS_CC_", "NODE_CACHE"))  # PyTorch's messages, and variables
        assert others or [part for part in parts if not any(part.strip() in text for text in said)] == [], message
