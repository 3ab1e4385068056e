"""Tables of the pages that are made from the code: python -m scripts.page_tables writes them anew.

A table stands between two comments of its page, `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from optimus_cc_ext.compressors.formats import BLOCK as BLOCK_LENGTH
from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.config import default_of, flag_of, values_of
from optimus_cc_ext.config.artifact import ARTIFACT_FLAGS
from optimus_cc_ext.config.classes import CLASSES, TrafficClass
from optimus_cc_ext.config.flags import PRESETS, flag_fields
from optimus_cc_ext.config.options import literals_of, type_of
from optimus_cc_ext.config.refusals import REFUSALS

ROOT = Path(__file__).resolve().parents[1]
GENERATED = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def flags() -> str:
    """Make the table of all flags, with their values, defaults, the artifact's names and their help."""
    rows = [[f"`--optimus-cc [{{{','.join(PRESETS)}}}]`", "off; alone it is paper", "", "Preset: see below."]]
    for field in flag_fields():
        if not field.metadata["help"]:
            continue
        words = ",".join(literals_of(field.type))
        shown = "" if type_of(field) is bool else values_of(field).metavar or f"{{{words}}}"
        artifact = [f"`{flag.spelling}`" for flag in ARTIFACT_FLAGS if field.name in flag.fields]
        flag = f"`{f'{flag_of(field.name)} {shown}'.rstrip()}`"
        rows.append([flag, str(default_of(field)), ", ".join(artifact), field.metadata["help"]])
    return markdown(("flag", "default", "the published artifact's name", "meaning"), rows)


def classes() -> str:
    """Make the table of the classes of traffic, with their formats and what each preset sends."""
    rows = []
    for traffic in CLASSES:
        formats = ", ".join(str(form) for form in traffic.formats if form != "dense")
        sent = [_of_preset(traffic, name) for name in ("balanced", "exact", "paper")]
        rows.append([traffic.tag, f"`{traffic.format_flag}`", f"{traffic.collective} {traffic.group}", formats, *sent])
    return markdown(("class", "flag", "in vanilla Megatron", "formats", "`balanced`", "`exact`", "`paper`"), rows)


def _of_preset(traffic: TrafficClass, preset: str) -> str:
    wanted = traffic.presets.get(preset, {})
    return str(wanted.get(traffic.format_field, "one reduction, dense" if wanted else "dense"))


def formats() -> str:
    """Make the table of the block formats, with bits a value and the relative error of a message."""
    offered = {form for traffic in CLASSES for form in traffic.formats}
    scale = 16 / BLOCK_LENGTH
    rows = [
        [form.name, f"{form.bits + scale:.3f}", f"{100 * form.gaussian_error:.2g} %"]
        for form in FORMATS.values() if form.name in offered
    ]  # fmt: skip
    return markdown(("format", "bits a value", "error of a message of Gaussian values"), rows)


def refusals() -> str:
    """Make the table of Megatron's options that classes of traffic do not support."""
    rows = [
        [
            f"`{refusal.flag}`",
            "the whole run" if refusal.whole_run else _classes_of(refusal.classes),
            refusal.reason,
            refusal.cure,
        ]
        for refusal in REFUSALS
    ]
    return markdown(("option", "what is refused, or left dense by a preset", "reason", "cure"), rows)


def _classes_of(classes: tuple[TrafficClass, ...]) -> str:
    return "all" if classes == CLASSES else ", ".join(traffic.tag for traffic in classes)


TABLES: Mapping[str, Callable[[], str]] = {
    "flags": flags, "classes": classes, "formats": formats, "refusals": refusals,
}  # fmt: skip
"""The generated tables by the name in their comment."""


def with_tables(text: str) -> str:
    """Return the text of a page with its generated tables made anew."""
    return GENERATED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)


def without_tables(text: str) -> str:
    """Return the text of a page without its generated tables."""
    return GENERATED.sub("", text)


def main() -> int:
    """Write the generated tables of all pages anew."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        if (made := with_tables(text)) != text:
            page.write_text(made)
            print(f"written: {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
