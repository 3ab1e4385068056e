"""The page: everything in one file, nothing from a network. What is given is escaped here."""

import base64
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from optimus_cc_ext._version import __version__

__all__ = ["alarm", "card", "document", "folded", "grid", "listed", "machine", "number", "picture", "points"]

_STYLE = """
:root { color-scheme: light; --ink: #24292f; --dim: #57606a; --line: #e3e7ec; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f8fa; color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 0 0 12px; font-size: 18px; }
.lead { margin: 10px 0 28px; color: var(--dim); max-width: 76ch; }
.grid { display: grid; gap: 18px; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); margin-bottom: 18px; }
.wide { grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
.card { background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px; margin-bottom: 18px;
  overflow-x: auto; }
.grid > .card { margin: 0; }
.note, .name { color: var(--dim); font-size: 14px; }
.number { font-size: 34px; font-weight: 650; letter-spacing: -.02em; line-height: 1.25; }
img { display: block; max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--dim); font-weight: 500; font-size: 14px; } tr:last-child td { border-bottom: 0; }
tr.sum td { font-weight: 650; border-top: 2px solid var(--line); }
pre { background: #f6f8fa; border-radius: 8px; padding: 12px 14px; font-size: 13px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
.alarm { background: #fff1f0; border: 2px solid #d1242f; color: #86181d; }
"""


def document(title: str, lead: str, *blocks: str) -> str:
    """The whole page of `blocks`, which the functions below made."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body><main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{"\n".join(blocks)}
</main></body>
</html>
"""


def card(heading: str, *parts: str, kind: str = "") -> str:
    """Parts that belong together."""
    head = f"<h2>{escape(heading)}</h2>" if heading else ""
    return f'<section class="card {kind}">{head}{"".join(parts)}</section>'


def grid(*cards: str, wide: bool = False) -> str:
    """Cards side by side, as far as the window is wide enough."""
    return f'<div class="grid{" wide" if wide else ""}">{"".join(cards)}</div>'


def number(name: str, value: str, note: str) -> str:
    """A card of one large number."""
    texts = {"name": name, "number": value, "note": note}
    return card("", *(f'<div class="{kind}">{escape(text)}</div>' for kind, text in texts.items()))


def points(facts: Mapping[str, str], note: str = "") -> str:
    """A list: name and text of each."""
    items = "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in facts.items())
    return f'<ul>{items}</ul><p class="note">{escape(note)}</p>'


def listed(texts: Sequence[str]) -> str:
    """Sentences, one below the other."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def folded(summary: str, texts: Mapping[str, str]) -> str:
    """Long texts, to be unfolded."""
    parts = "".join(f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in texts.items())
    return f"<details><summary>{escape(summary)}</summary>{parts}</details>"


def picture(path: Path) -> str:
    """An SVG, held by the page and sharp at any size."""
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(path.stem.replace("_", " "))}" src="data:image/svg+xml;base64,{content}">'


def alarm(heading: str, complaints: list[str]) -> str:
    """What must not be overlooked; nothing where there are no complaints."""
    return card(heading, listed(complaints), kind="alarm") if complaints else ""


def machine() -> dict[str, str]:
    """Where something was measured, and with what."""
    packages = {name: importlib.metadata.version(name) for name in ("megatron-core", "torch")}
    system = f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return {"system": system, "python": platform.python_version(), "optimus_cc_ext": __version__, **packages}
