"""The page: everything in one file, nothing from a network."""

from html import escape

from optimus_cc_ext.quickstart.report import Outcome, Share, cross_check, relative, shares, summarize, time_remark
from optimus_cc_ext.quickstart.settings import RUNS
from optimus_cc_ext.quickstart.workspace import PICTURES

__all__ = ["build_page"]

_STYLE = """
:root { color-scheme: light; --ink: #24292f; --dim: #57606a; --line: #e3e7ec; --accent: #c8630b; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f8fa; color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 0 0 12px; font-size: 18px; }
.lead { margin: 10px 0 28px; color: var(--dim); max-width: 76ch; }
.grid { display: grid; gap: 18px; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); }
.wide { grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
.card { background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px; margin-bottom: 18px; }
.grid > .card { margin: 0; } .grid { margin-bottom: 18px; }
.name { color: var(--dim); font-size: 14px; }
.number { font-size: 34px; font-weight: 650; letter-spacing: -.02em; line-height: 1.25; }
.note { color: var(--dim); font-size: 14px; }
img { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--dim); font-weight: 500; font-size: 14px; } tr:last-child td { border-bottom: 0; }
.facts td { text-align: left; } .facts td:first-child { color: var(--dim); width: 9em; }
tr.all td { font-weight: 650; border-top: 2px solid var(--line); }
pre { overflow-x: auto; background: #f6f8fa; border-radius: 8px; padding: 12px 14px; font-size: 13px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
.alarm { background: #fff1f0; border: 2px solid #d1242f; color: #86181d; }
"""


def build_page(outcome: Outcome, pictures: dict[str, str]) -> str:
    """The whole of index.html; `pictures` maps each name in `PICTURES` to a data URI."""
    settings = outcome.settings
    *_, everything = shares(outcome.compressed)
    gap = relative(outcome.compressed.validation.last, outcome.vanilla.validation.last)
    lead = (
        f"The same GPT ({settings.parameters / 1e6:.1f} million parameters, tied embeddings), the same seed and the"
        f" same text, trained twice by NVIDIA Megatron on {settings.stages} pipeline stages x {settings.replicas}"
        f" data-parallel replicas: once vanilla, once with Optimus-CC. {settings.iterations} iterations each,"
        f" on {escape(outcome.text)}."
    )
    cards = (
        ("traffic sent", f"{everything.ratio:.1%}", f"of what vanilla sends: {_megabytes(everything)} per iteration"),
        (
            "final validation loss",
            f"{gap:+.2%}",
            f"{outcome.compressed.validation.last:.4f} compressed, {outcome.vanilla.validation.last:.4f} vanilla",
        ),
        (
            "seconds per iteration",
            f"{outcome.compressed.median_seconds:.2f}",
            f"{outcome.vanilla.median_seconds:.2f} vanilla; medians. {escape(time_remark(outcome))}",
        ),
    )
    training, validation, traffic = (_picture(name, pictures[name]) for name in PICTURES)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Optimus-CC quickstart</title>
<style>{_STYLE}</style>
</head>
<body><main>
<h1>Optimus-CC on Megatron, side by side</h1>
<p class="lead">{lead}</p>
{_alarm(cross_check(outcome.vanilla, outcome.compressed))}
<div class="grid">{"".join(_card(*card) for card in cards)}</div>
<div class="grid wide">{training}{validation}</div>
<div class="grid wide">{traffic}<section class="card"><h2>Traffic per iteration</h2>{_traffic_table(outcome)}
<p class="note">Logical bytes of all ranks together. Raw: what vanilla Megatron sends; the vanilla run
confirms it.</p>
</section></div>
<section class="card"><h2>What was on</h2>{_techniques(outcome)}</section>
<section class="card"><h2>Text and time</h2>{_facts(outcome)}</section>
<section class="card"><details><summary>The two command lines</summary>{_commands(outcome)}</details></section>
</main></body>
</html>
"""


def _card(name: str, number: str, note: str) -> str:
    return (
        f'<section class="card"><div class="name">{name}</div><div class="number">{number}</div>'
        f'<div class="note">{note}</div></section>'
    )


def _picture(name: str, uri: str) -> str:
    return f'<section class="card"><img alt="{name.replace("_", " ")}" src="{uri}"></section>'


def _alarm(complaints: list[str]) -> str:
    if not complaints:
        return ""
    lines = "".join(f"<li>{escape(complaint)}</li>" for complaint in complaints)
    return f'<section class="card alarm"><h2>Cross-check failed: do not trust the bytes</h2><ul>{lines}</ul></section>'


def _megabytes(share: Share) -> str:
    return f"{share.sent / 1e6:.1f} of {share.raw / 1e6:.1f} MB"


def _traffic_table(outcome: Outcome) -> str:
    *classes, everything = shares(outcome.compressed)
    head = "".join(f"<th>{name}</th>" for name in ("", "raw MB", "sent MB", "sent / raw"))
    rows = "".join(f"<tr>{_traffic_cells(share)}</tr>" for share in classes)
    return f'<table><tr>{head}</tr>{rows}<tr class="all">{_traffic_cells(everything)}</tr></table>'


def _traffic_cells(share: Share) -> str:
    values = (share.name, f"{share.raw / 1e6:.3f}", f"{share.sent / 1e6:.3f}", f"{share.ratio:.1%}")
    return "".join(f"<td>{value}</td>" for value in values)


def _techniques(outcome: Outcome) -> str:
    items = "".join(f"<li><b>{run}</b>: {escape(outcome.runs[run].techniques)}</li>" for run in RUNS)
    return f"<ul>{items}</ul><p class='note'>{escape(' '.join(outcome.remarks))}</p>"


def _facts(outcome: Outcome) -> str:
    summary, data, settings = summarize(outcome), outcome.data, outcome.settings
    facts = {
        "text": f"{data.text_bytes / 1e6:.1f} MB in {data.documents:,} documents: {data.tokens:,} tokens",
        "trained on": f"{settings.iterations * settings.global_batch * settings.sequence:,} tokens in each run",
        "model": f"{settings.layers} layers, hidden {settings.hidden}, {settings.heads} heads, sequence"
        f" {settings.sequence}, vocabulary {data.vocab_size:,}",
        "time": f"{outcome.seconds / 60:.1f} minutes: text {outcome.preparation_seconds:.0f} s, "
        + ", ".join(f"{run} {outcome.runs[run].seconds:.0f} s" for run in RUNS)
        + f"; {summary['cores']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
    }
    rows = "".join(f"<tr><td>{name}</td><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
    return f'<table class="facts">{rows}</table>'


def _commands(outcome: Outcome) -> str:
    return "".join(f"<h3>{run}</h3><pre>{escape(outcome.runs[run].command)}</pre>" for run in RUNS)
