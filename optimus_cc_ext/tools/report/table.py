"""A table, which can be written as CSV, as Markdown (which rich renders on a terminal), and as HTML."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import isfinite
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
    bars: Sequence[str] = ()
    """Columns whose numbers have bars on the page: of one scale above a sum, else of a scale for each row."""

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

    def in_words(self, by: Sequence[str], shown: Sequence[str]) -> str:
        """Return a description of a picture of the table, for those who do not see it: the first and the last value of
        each column `shown`, for each group of rows that have the same cells in the columns `by`.
        """
        groups: dict[str, list[dict[str, Cell]]] = {}
        for record in self.records():
            groups.setdefault(", ".join(_for_people(record[name]) for name in by), []).append(record)
        clauses = []
        for group, rows in groups.items():
            ends = ((name, dict.fromkeys(_for_people(row[name]) for row in (rows[0], rows[-1]))) for name in shown)
            clauses.append(f"{group}: {', '.join(f'{name} {" to ".join(values)}' for name, values in ends)}")
        return "; ".join(clauses) + "."

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
        # A run's name has no blanks, so it breaks where its words end, and a long one anywhere if it has to.
        names = ((re.sub(r"(?<=[_/.=])", "<wbr>", escape(name)), len(name) > 24) for name in self.columns)
        head = "".join(f"<th{' class=long' * long}>{name}</th>" for name, long in names)
        lengths = [
            max((abs(_value(row[self.columns.index(name)])) for name in self.bars), default=0) for row in self.rows
        ]
        scales = [*[max(lengths[:-1], default=0)] * (len(lengths) - 1), 0] if self.last_is_sum else lengths
        rows = ["".join(self._cells_html(row, scale)) for row, scale in zip(self.rows, scales, strict=True)]
        marks = [""] * (len(rows) - 1) + [' class="sum"' if self.last_is_sum else ""]
        body = "".join(f"<tr{mark}>{row}</tr>" for mark, row in zip(marks, rows, strict=False))
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return f'<table class="stack"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}'

    def _cells_html(self, row: tuple[Cell, ...], largest: float) -> Iterator[str]:
        for place, (column, cell) in enumerate(zip(self.columns, row, strict=True)):
            # On a phone a row is a block, in which each cell stands behind the name of its column.
            name, bar = f' data-name="{escape(column)}"' if place else "", ""
            if column in self.bars and largest:
                width, tone = abs(_value(cell)) / largest, ("blue", "orange")[self.bars.index(column) % 2]
                bar = f'<span class="bar" style="width:{width:.1%};background:var(--{tone})"></span>'
            yield f"<td{name}>{escape(_for_people(cell))}{bar}</td>"


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


def _value(cell: Cell) -> float:
    """Return a cell, which may be a formatted number, as a number; 0 if it is unknown or not finite."""
    return float(cell or 0) if not _unknown(cell) and isfinite(float(cell or 0)) else 0.0


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
