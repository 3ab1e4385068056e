"""A table, which can be written as CSV, as Markdown (which rich renders on a terminal), and as HTML."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows of named columns. None and NaN are unknown values, for example of a run that is missing or ended early."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    title: str = ""
    note: str = ""
    last_is_sum: bool = False
    name: str = ""
    """File name, without the suffix, of the CSV that a document writes; empty: none is written."""

    @staticmethod
    def read_csv(path: Path, **further: Any) -> "Table":
        """Read a CSV file, with numbers as numbers, into a table with the attributes `further`; no rows if the file is
        absent.
        """
        if not path.is_file():
            return Table((), [], **further)
        with path.open(newline="", encoding="utf-8") as stream:
            columns, *rows = csv.reader(stream)
        return Table(tuple(columns), [tuple(map(_number, row)) for row in rows], **further)

    def column(self, name: str) -> list[Cell]:
        return [row[self.columns.index(name)] for row in self.rows]

    def numbers(self, name: str) -> list[float]:
        """Return all values of one column as numbers, NaN for unknown ones."""
        return [float("nan") if cell is None else float(cell) for cell in self.column(name)]

    def distinct(self, name: str) -> list[Cell]:
        """Return the distinct values of one column, in order."""
        return list(dict.fromkeys(self.column(name)))

    def where(self, **values: Cell) -> "Table":
        """Return the table of the rows that have these values in these columns."""
        wanted = [(self.columns.index(name), value) for name, value in values.items()]
        return replace(self, rows=[row for row in self.rows if all(row[place] == value for place, value in wanted)])

    def records(self) -> list[dict[str, Cell]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def write_csv(self, path: Path) -> None:
        """Write the table as a CSV file with all digits."""
        path.write_text(self.csv(), encoding="utf-8", newline="")

    def csv(self) -> str:
        """Return the table as CSV text with all digits."""
        stream = io.StringIO()
        writer = csv.writer(stream)
        writer.writerow(self.columns)
        writer.writerows(["" if _unknown(cell) else cell for cell in row] for row in self.rows)
        return stream.getvalue()

    def markdown(self) -> str:
        """Return title, table and note as Markdown."""
        lines = [f"## {self.title}", ""] if self.title else []
        lines += ["| " + " | ".join(self.columns) + " |", "|---|" + "---:|" * (len(self.columns) - 1)]
        lines += ["| " + " | ".join(map(_for_people, row)) + " |" for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])

    def html(self) -> str:
        """Return table and note as HTML; the title is left to the surrounding box."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = ["".join(map(self._cell_html, self.columns, row)) for row in self.rows]
        marks = [""] * (len(rows) - 1) + [' class="sum"' if self.last_is_sum else ""]
        body = "".join(f"<tr{mark}>{row}</tr>" for mark, row in zip(marks, rows, strict=False))
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return f'<table class="stack"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}'

    def _cell_html(self, column: str, cell: Cell) -> str:
        # On a phone a row is a block, in which each cell stands behind the name of its column.
        name = f' data-name="{escape(column)}"' if column and column != self.columns[0] else ""
        return f"<td{name}>{escape(_for_people(cell))}</td>"


def printed(tables: Sequence[Table], form: str) -> str:
    """Return all tables as one text: `json`, `csv`, or, for `table`, Markdown."""
    if form == "json":
        return json.dumps({table.title or "table": table.records() for table in tables}, indent=1) + "\n"
    return "\n".join(table.csv() if form == "csv" else table.markdown() for table in tables) + "\n" * (form == "table")


def _number(text: str) -> Cell:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _unknown(cell: Cell) -> bool:
    return cell is None or cell != cell


def _for_people(cell: Cell) -> str:
    """Return a cell as text for readers: numbers with four digits, text unchanged."""
    if _unknown(cell):
        return "-"
    if isinstance(cell, float):
        small = cell and abs(cell) < 1e-3
        return f"{cell:.3e}" if small else f"{cell:,.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) and cell >= 10_000 else str(cell)
