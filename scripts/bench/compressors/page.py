"""Output of the compressors' benchmark: JSON, a page and pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimus_cc_ext.tools.report.document import Box, Part, Picture, ReportDocument
from optimus_cc_ext.tools.report.table import Cell, Table
from scripts.bench.compressors.sections import SECTIONS, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write"]


def write(machine: Mapping[str, Cell], measured: Mapping[str, Sequence[Row]], stem: Path) -> None:
    """Write STEM.json, STEM.md with the tables, and STEM-slices as a picture, of the sections `measured`."""
    rows = [{"section": section, **row} for section, found in measured.items() for row in found]
    text = json.dumps({"machine": machine, "rows": rows}, indent=1)
    stem.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    lead = f"{', '.join(f'{name}: {value}' for name, value in machine.items())}."
    measures = "Medians and interquartile ranges of `torch.utils.benchmark`, all contenders in turn. One run."
    parts: list[Part] = [measures]
    for section in SECTIONS:
        shown: list[Part] = [_table(section, measured[section])] if section in measured else ["not measured"]
        if section == "slices" and isinstance(shown[0], Table):
            words = shown[0].in_words(["model", "work"], ["rank", "Gbit/s"])
            shown.insert(0, Picture(f"{stem.name}-{section}", _draw_slices(shown[0]), words))
        parts.append(Box(section, shown))
    ReportDocument("Compressors", lead, parts).write(stem.parent, markdown=f"{stem.name}.md")


def _table(section: str, rows: Sequence[Row]) -> Table:
    """Make a section's table, with a column that compares each work with ours of the same case and part."""

    def ours(row: Row) -> float | None:
        parts = str(row["work"]).split(", ")[1].split(" and ") if section == "slices" else []
        wanted = [f"ours, {part}" for part in parts] or ["ours"]
        found = [float(each["ms"] or 0.0) for each in rows if each["case"] == row["case"] and each["work"] in wanted]
        return sum(found) if len(found) == len(wanted) else None

    compared = [
        row | {"times ours": float(row["ms"]) / base if base and row["ms"] else None}
        for row in rows
        for base in [ours(row)]
    ]
    columns = tuple(dict.fromkeys(name for row in compared for name in row))
    return Table(columns, [tuple(row.get(name) for name in columns) for row in compared])


def _draw_slices(table: Table) -> "Figure":
    """Draw figure 14: Gbit/s of the slice, by compression rank."""
    # matplotlib is not on every machine with a GPU, and no other section needs it.
    from optimus_cc_ext.tools.report.pictures import lines, side_by_side, tidy

    models = table.distinct("model")
    figure, row = side_by_side(len(models), 3.4, 3.2)
    for axes, model in zip(row, models, strict=True):
        lines(axes, table.where(model=model), "rank", "Gbit/s", by="work")
        axes.set(xlabel="compression rank", ylabel="Gbit/s", yscale="log")
        tidy(axes, str(model))
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    return figure
