"""A table, written once: as CSV, as Markdown (which rich shows on a terminal), and for the page."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

__all__ = ["Cell", "Table"]

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Named columns. None and NaN are values that are not known: of a run that is missing or was ended early."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    title: str = ""
    note: str = ""
    last_is_sum: bool = False

    def column(self, name: str) -> list[Cell]:
        """All values of one column."""
        return [row[self.columns.index(name)] for row in self.rows]

    def numbers(self, name: str) -> list[float]:
        """The same where they are numbers, NaN where they are not known."""
        return [float("nan") if cell is None else float(cell) for cell in self.column(name)]

    def distinct(self, name: str) -> list[Cell]:
        """Each value of one column once, in order."""
        return list(dict.fromkeys(self.column(name)))

    def where(self, **values: Cell) -> "Table":
        """The rows that have these values in these columns."""
        wanted = [(self.columns.index(name), value) for name, value in values.items()]
        return replace(self, rows=[row for row in self.rows if all(row[place] == value for place, value in wanted)])

    def records(self) -> list[dict[str, Cell]]:
        """The rows, as JSON has them."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def write_csv(self, path: Path) -> None:
        """Every digit, for further work."""
        path.write_text(self.csv(), encoding="utf-8", newline="")

    def csv(self) -> str:
        """The same as text."""
        stream = io.StringIO()
        writer = csv.writer(stream)
        writer.writerow(self.columns)
        writer.writerows(["" if _unknown(cell) else cell for cell in row] for row in self.rows)
        return stream.getvalue()

    def markdown(self) -> str:
        """Title, table and note."""
        lines = [f"## {self.title}", ""] if self.title else []
        lines += ["| " + " | ".join(self.columns) + " |", "|---|" + "---:|" * (len(self.columns) - 1)]
        lines += ["| " + " | ".join(map(_for_people, row)) + " |" for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])

    def html(self) -> str:
        """Table and note; the title is for what stands around it."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = ["".join(f"<td>{escape(_for_people(cell))}</td>" for cell in row) for row in self.rows]
        marks = [""] * (len(rows) - 1) + [' class="sum"' if self.last_is_sum else ""]
        body = "".join(f"<tr{mark}>{row}</tr>" for mark, row in zip(marks, rows, strict=False))
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return f"<table><tr>{head}</tr>{body}</table>{note}"


def _unknown(cell: Cell) -> bool:
    return cell is None or cell != cell


def _for_people(cell: Cell) -> str:
    """Four digits; text as it is."""
    if _unknown(cell):
        return "-"
    if isinstance(cell, float):
        small = cell and abs(cell) < 1e-3
        return f"{cell:.3e}" if small else f"{cell:,.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) and cell >= 10_000 else str(cell)
