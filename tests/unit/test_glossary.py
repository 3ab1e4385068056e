"""The glossary names what the code has, and every page uses its words and defines its abbreviations."""

import ast
import re
from pathlib import Path

import pytest

from optimus_cc_ext.announce import COMMUNICATORS, COMPRESSION_STATE, MESSAGE_BUFFERS
from scripts.page_tables import without_tables

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = (ROOT / "docs" / "develop" / "glossary.md").read_text()
PLACE = r"`(\w+/\w+\.py)`: `([\w.]+)`"
"""A file below `optimus_cc_ext/`, and the name of a definition in it."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

LONG_FORMS = {
    "CB": "compressed backpropagation",
    "FE": "fused embedding synchronisation",
    "SC": "selective stage compression",
    "LEP": "lazy error propagation",
    "TP": "tensor-parallel size",
    "PP": "pipeline-parallel size",
    "DP": "data-parallel",
    "CP": "context-parallel size",
    "EP": "expert-parallel size",
    "MTP": "multi-token prediction",
    "D": "data-parallel size|replicas",
    "E": "residual",
    "G": "gradient",
    "M": "gradient G plus residual E|G \\+ E",
    "P": "factors?|factors P and",
    "Q": "factors?|factors P and",
    "T": "transpose[ds]?",
}
"""Abbreviations that a page defines where it first uses them, with their long forms as regular expressions."""

KNOWN = {
    "hardware, networks, signals": "AMD AVX CPU CUDA EPYC GPU HDR NDR NIC NVIDIA RDMA SHARP SIGKILL SIGTERM SIGUSR TB "
    "GB MB TFLOPS",
    "names in Megatron's and torch's command lines and logs": "DDP FP FSDP GEMM GPT HSDP LM NCCL NGC SGD",
    "programming": "API BPE C CI CSV DEBUG INFO JSON PATH TOML WARNING XOR",
    "a reader's questions": "I",
    "Slurm's words": "FAILED QOS",
    "names of models, tasks, papers, systems, files, GPUs (A100, B200, H100)": "A ACP AIS AQ ASPLOS B BLOOM CC "
    "CHANGELOG CITATION COCCL CONTRIBUTING EDGC GH GTP H LAMBADA MT MXFP NLG PIQA QSDP RACE SCAPE SNU "
    "TACO TAH UCCL V ZFP",
    "Weights & Biases, as W&B": "W",
}
"""Capitals that a Megatron engineer reads without a definition, by the reason."""

SYNONYMS = {
    "residual or compression error": r"what (is|was|a message|the messages?|they|it) (left|leaves?|lost|lacks?)",
    "compression state": r"compressors'? state|what is remembered|remembers? (nothing|anything)|nothing is remembered",
    "message buffers": r"buffers for messages|messages of gradients and parameters:",
    "applied step": r"(step|steps) (that )?(counts?|counted)\b|when it counts",
    "message or wire format": r"what (it|they) travels? as|what travels",
    "vanilla": r"plain Megatron|unmodified Megatron",
    "dense": r"sent as (it is|they are)|sends? .{0,30} as (it is|they are)",
}
"""Wordings that stand in for a word of the glossary, as regular expressions."""

EXEMPT = {"docs/develop/glossary.md"}
"""The page that defines the words."""


def prose(text: str) -> str:
    """Return the page without code, addresses of links and line breaks within paragraphs."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "`", re.sub(r"\]\([^)]*\)", "]", text))
    return " ".join(text.split())


def undefined(text: str) -> list[str]:
    """Return the abbreviations that the page `text` uses before it defines them, or that nobody knows."""
    text, known = prose(text), set(" ".join(KNOWN.values()).split())
    found, seen = [], set()
    for match in re.finditer(r"(?<![\w/.-])([A-Z]+)(?='?\d*s?(?!\w))", text):
        name = match[1]
        if name in known or name in seen:
            continue
        seen.add(name)
        if name not in LONG_FORMS or not defines(name, text[: match.start()], text[match.start() :]):
            found.append(name)
    return sorted(found)


def defines(name: str, before: str, after: str) -> bool:
    """Tell if the first use of `name`, between `before` and `after`, is its definition: `long form (NAME)`, `NAME (long
    form)`, `NAME = long form` or, for letters, `long form NAME`."""
    long_form = f"(?:{LONG_FORMS[name]})"
    return bool(
        re.search(rf"{long_form}[^\w.]{{0,3}}$", before, re.IGNORECASE)
        or re.match(
            rf"{name}\W{{1,3}}(?:{name}\W{{1,3}})?(?:(?:is|are|means) )?(?:the |a |its )?{long_form}",
            after,
            re.IGNORECASE,
        )
    )


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_check_sees_an_abbreviation_before_its_definition() -> None:
    assert undefined("Compressed backpropagation (CB) helps. CB is `SC`. | FE |") == ["FE"]
    assert undefined("CB helps. Compressed backpropagation (CB) is a technique. On XYZ.") == ["CB", "XYZ"]
    assert undefined("The gradient G plus the residual E: M = G + E, on 4 A100s with C++ and W&B") == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_defines_an_abbreviation_where_it_first_uses_it(page: Path) -> None:
    if named(page) not in EXEMPT:
        assert undefined(without_tables(page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_uses_the_words_of_the_glossary(page: Path) -> None:
    if named(page) in EXEMPT:
        return
    text = prose(without_tables(page.read_text()))
    found = {word: match[0] for word, pattern in SYNONYMS.items() if (match := re.search(pattern, text))}
    assert found == {}, "word of the glossary: wording to replace"


def test_the_glossary_is_one_page_of_at_most_40_lines_with_every_abbreviation() -> None:
    assert len(GLOSSARY.splitlines()) <= 40
    assert [name for name in LONG_FORMS if not re.search(rf"\b{name}\b", GLOSSARY)] == []


def test_the_page_of_flags_has_each_kind_of_memory_by_its_name_in_the_log() -> None:
    _, _, section = (ROOT / "docs" / "flags.md").read_text().partition("## Memory\n")
    assert [name for name in (COMPRESSION_STATE, MESSAGE_BUFFERS, COMMUNICATORS) if f"| {name} |" not in section] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_places_in_the_code_that_a_page_names_exist(page: Path) -> None:
    for path, name in re.findall(PLACE, page.read_text()):
        tree = ast.parse((ROOT / "optimus_cc_ext" / path).read_text())
        assert has(tree, name.split(".")), f"{path}: {name}"


def has(tree: ast.AST, names: list[str]) -> bool:
    """Tell if the body of `tree` defines names[0], and that definition names[1] and so on."""
    if not names:
        return True
    for node in ast.walk(tree) if isinstance(tree, ast.ClassDef) else ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == names[0]:
            return has(node, names[1:])
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(ast.unparse(target) in (names[0], f"self.{names[0]}") for target in targets):
            return True
    return False
