"""A report document: a title and parts, written as an HTML page, as Markdown, and as CSV and picture files beside them.

The page is one file that loads nothing from a network. All text of a part but a fragment is escaped on the page.
"""

import importlib.metadata
import io
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, assert_never

from optimus_cc_ext._version import __version__
from optimus_cc_ext.tools.data.output import write_whole
from optimus_cc_ext.tools.report.style import themed, variables
from optimus_cc_ext.tools.report.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure, saved as NAME.svg for pages, light and dark, NAME.png for mails and NAME.pdf for papers."""

    name: str
    figure: "Figure"
    words: str
    """Description of the picture with its numbers, for those who do not see it."""

    @property
    def title(self) -> str:
        """The name as words."""
        return self.name.replace("_", " ").capitalize()

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The contents of the picture's files by suffix; drawn once."""
        from matplotlib import rc_context

        found = {}
        for suffix in ("png", "svg", "pdf"):
            stream = io.BytesIO()
            # Without date and random names, the same picture gives the same file.
            with rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none"}):
                none = dict.fromkeys(("Date", "Creator", "Format", "Type")) if suffix == "svg" else None
                self.figure.savefig(stream, format=suffix, dpi=150, metadata=none)
            found[suffix] = stream.getvalue()
        found["svg"] = themed(found["svg"].decode(), self.name, self.title, self.words).encode()
        return found

    def save(self, folder: Path) -> None:
        for suffix, content in self.files.items():
            (folder / f"{self.name}.{suffix}").write_bytes(content)


@dataclass(frozen=True)
class Points:
    """A list of (name, text) items, with an optional note below; an item with an empty name is text only."""

    items: Sequence[tuple[str, str]]
    note: str = ""

    @staticmethod
    def of(texts: Sequence[str]) -> "Points":
        """Return a list of texts without names."""
        return Points([("", text) for text in texts])


@dataclass(frozen=True)
class Folded:
    """Long texts by name, which the page shows when the reader unfolds them."""

    summary: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Number:
    """A box with one large number: its name, its value, and a sentence about its meaning."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Box:
    """A group of parts. If the heading is empty, the page uses the title of a table that comes first."""

    heading: str
    parts: "Sequence[Part]"
    kind: str = "card"
    """CSS class of the box: `card alarm` for warnings; `grid`, or `grid wide` for wider parts, to put parts side by
    side in boxes of their own.
    """


@dataclass(frozen=True)
class Fragment:
    """HTML that the page contains unchanged, such as a part with a script; Markdown leaves it out."""

    html: str


Part = str | Table | Picture | Points | Folded | Number | Box | Fragment
"""A piece of a document; a string is a paragraph."""


@dataclass(frozen=True)
class ReportDocument:
    """A report document. On the page, a table or picture outside of every box gets a box of its own."""

    title: str
    lead: str
    parts: Sequence[Part]
    files: Sequence[Table | Picture] = ()
    """Tables and pictures that are written as files only."""

    def markdown(self) -> str:
        """Return the document as Markdown. Pictures are links to SVG files, which follow the reader's colour scheme."""
        head = [f"# {self.title}\n\n{self.lead}\n"] if self.title else []
        return "\n".join([*head, *map(_markdown, self.parts)])

    def html(self) -> str:
        parts = "\n".join(map(_boxed, self.parts))
        template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
        texts = {"title": escape(self.title), "lead": escape(self.lead)}
        return template.substitute(texts, colours=variables(), parts=parts)

    def write(self, folder: Path, *, page: str = "", markdown: str = "") -> None:
        """Write all pictures, and a CSV file for each named table, into `folder`, which is made if it does not exist.

        Args:
            page: name of the HTML file; empty: none is written.
            markdown: name of the Markdown file; empty: none is written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for part in (*_each(self.parts), *self.files):
            if isinstance(part, Picture):
                part.save(folder)
            elif isinstance(part, Table) and part.name:
                part.write_csv(folder / f"{part.name}.csv")
        for name, text in ((page, self.html), (markdown, self.markdown)):
            if name:
                write_whole(folder / name, text())


def _each(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield all parts, including those inside boxes."""
    for part in parts:
        yield part
        yield from _each(part.parts if isinstance(part, Box) else ())


def _boxed(part: Part) -> str:
    """Return `part` as HTML, in a box of its own unless it is a box."""
    return _html(part if isinstance(part, Box | Number | Fragment | str) else Box("", [part]))


def _html(part: Part) -> str:
    match part:
        case str():
            return f"<p>{escape(part)}</p>"
        case Table():
            return part.html()
        case Picture():
            # SVG inside the page is sharp at any size, and its words are text. HTML knows its namespaces.
            svg = part.files["svg"].decode()
            return re.sub(r'\A.*?(?=<svg)| xmlns(:\w+)?="[^"]*"', "", svg, flags=re.DOTALL)
        case Points(items, note):
            lines = (f"{f'<b>{escape(name)}</b>: ' if name else ''}{escape(text)}" for name, text in items)
            below = f'<p class="note">{escape(note)}</p>' if note else ""
            return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>{below}"
        case Folded(summary, texts):
            long = "".join(f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in texts.items())
            return f"<details><summary>{escape(summary)}</summary>{long}</details>"
        case Number(name, value, note):
            texts = {"name": name, "number": value, "note": note}
            lines = (f'<div class="{kind}">{escape(text)}</div>' for kind, text in texts.items())
            return f'<section class="card">{"".join(lines)}</section>'
        case Fragment(html):
            return html
        case Box(heading, parts, kind) if kind.startswith("grid"):
            return f'<div class="{kind}">{"".join(map(_boxed, parts))}</div>'
        case Box(heading, parts, kind):
            heading = heading or (parts[0].title if isinstance(parts[0], Table) else "")
            head = f"<h2>{escape(heading)}</h2>" if heading else ""
            return f'<section class="{kind}">{head}{"".join(map(_html, parts))}</section>'
    assert_never(part)


def _markdown(part: Part) -> str:
    """Return `part` as Markdown that ends with a line break."""
    match part:
        case str():
            return f"{part}\n"
        case Table():
            return part.markdown()
        case Picture(name, words=words):
            return f"![{words}]({name}.svg)\n"
        case Points(items, note):
            lines = (f"- {name}: {text}\n" if name else f"- {text}\n" for name, text in items)
            return "".join(lines) + (f"\n{note}\n" if note else "")
        case Folded(summary, texts):
            return "\n".join(f"{summary}, {name}:\n\n```\n{text}\n```\n" for name, text in texts.items())
        case Number(name, value, note):
            return f"**{value} {name}**: {note}\n"
        case Fragment():
            return ""
        case Box(heading, parts):
            return (f"## {heading}\n\n" if heading else "") + "\n".join(map(_markdown, parts))
    assert_never(part)


def machine() -> dict[str, str]:
    """Return the system and the package versions that a measurement was made with."""
    packages = {name: importlib.metadata.version(name) for name in ("megatron-core", "torch")}
    system = f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return {"system": system, "python": platform.python_version(), "optimus_cc_ext": __version__, **packages}
