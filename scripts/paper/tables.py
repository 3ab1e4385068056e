"""The paper's tables and figures as rows, made from the runs' logs."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from run_logs import MODELS, Run

__all__ = ["Table", "figure10", "figure11", "figure12", "figure14", "learning_curves", "table2"]

PRETRAINING_ITERATIONS = 230_000
_SECONDS_A_DAY = 86_400

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Named columns. A None is a value that is not known: a run that is missing or was ended early."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    note: str = ""

    def write_csv(self, path: Path) -> None:
        """Every digit, for further work."""
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(self.columns)
            writer.writerows(["" if cell is None else cell for cell in row] for row in self.rows)

    def markdown(self) -> str:
        """For people."""
        lines = [f"## {self.title}", ""] if self.title else []
        lines += ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(map(_for_people, row)) + " |" for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])


def table2(runs: Sequence[Run]) -> Table:
    """Perplexity, training time and speedup of pretraining."""
    rows = []
    for run in runs:
        loss = run.validation[max(run.validation)] if run.validation else None
        seconds = run.typical_seconds
        sent, raw = (sum(part[side] for part in run.last_traffic.values()) for side in (0, 1))
        rows.append((
            MODELS[run.model], run.name, max(run.losses), loss, None if loss is None else math.exp(loss), seconds,
            None if seconds is None else PRETRAINING_ITERATIONS * seconds / _SECONDS_A_DAY,
            _speedup(run, runs), 100 * sent / raw if raw else None,
        ))  # fmt: skip
    return Table(
        ("model", "variant", "iterations", "validation loss", "validation perplexity", "s per iteration",
         f"days for {PRETRAINING_ITERATIONS:,} iterations", "speedup", "traffic sent, %"),
        tuple(rows), "Table 2: pretraining",
        "Seconds are the median over the iterations. Traffic: what is sent of what the baseline sends, all classes.",
    )  # fmt: skip


def learning_curves(runs: Sequence[Run]) -> Table:
    """Figure 9: every validation, with the training time up to it."""
    rows = []
    for run in runs:
        for iteration, loss in sorted(run.validation.items()):
            hours = sum(seconds for done, seconds in run.seconds.items() if done <= iteration) / 3600
            rows.append((MODELS[run.model], run.name, iteration, hours, loss, math.exp(loss)))
    columns = ("model", "variant", "iteration", "training hours", "validation loss", "validation perplexity")
    return Table(columns, tuple(rows))


def figure10(runs: Sequence[Run]) -> Table:
    """The time of an iteration, what compression takes of it, and the traffic of each class."""
    classes = list(dict.fromkeys(name for run in runs for name in run.last_traffic))
    rows = []
    for run in runs:
        seconds, compression = run.typical_seconds, run.typical_compression_ms
        traffic = [run.last_traffic.get(name) for name in classes]
        rows.append((
            MODELS[run.model], run.name, None if seconds is None else 1e3 * seconds, _speedup(run, runs),
            compression.get("CB"), compression.get("SC"), *(None if part is None else part[0] for part in traffic),
        ))  # fmt: skip
    return Table(
        ("model", "variant", "ms per iteration", "speedup", "CB, ms", "SC, ms", *(f"{name}, MB" for name in classes)),
        tuple(rows), "Figure 10: time of an iteration",
        "Medians over the iterations after the first. CB and SC: compressing and decompressing, on the stage where it"
        " takes longest; part of the iteration. MB: sent per iteration, all ranks together.",
    )  # fmt: skip


def figure11(runs: Sequence[Run]) -> tuple[Table, Table]:
    """(every iteration and stage, a summary by stage): errors against differences between activations."""
    rows = [
        (MODELS[run.model], iteration, stage, *values)
        for run in runs
        for iteration, stages in sorted(run.statistics.items())
        for stage, values in sorted(stages.items())
    ]
    summary = []
    for model, stage in sorted({(str(row[0]), int(row[2])) for row in rows}):
        cosines, errors, differences = zip(
            *(row[3:] for row in rows if (row[0], row[2]) == (model, stage)), strict=True
        )
        summary.append((
            model, stage, len(cosines), _mean(cosines), max(map(abs, cosines)), _mean(errors), _mean(differences),
        ))  # fmt: skip
    columns = ("model", "iteration", "stage", "cosine", "mean error", "mean activation difference")
    heads = ("model", "stage", "iterations", "mean cosine", "largest absolute cosine", *columns[4:])
    title = "Figure 11: errors of compression against differences between activations"
    note = "Lazy error propagation rests on both being near 0: the cosine, and the average of the errors."
    return Table(columns, tuple(rows)), Table(heads, tuple(summary), title, note)


def figure12(runs: Sequence[Run]) -> Table:
    """Peak memory of the rank that takes most."""
    rows = []
    for run in runs:
        peak, source = _peak(run)
        base = next(
            (_peak(other)[0] for other in runs if (other.model, other.variant) == (run.model, "baseline")), None
        )
        more = None if not peak or not base else 100 * (peak / base - 1)
        rows.append((MODELS[run.model], run.name, peak, more, run.state or None, source))
    return Table(
        ("model", "variant", "peak, MB", "more than baseline, %", "compressor state, MB", "measured"), tuple(rows),
        "Figure 12: peak memory", "On the rank that takes most. MB of memory as Megatron counts them, 2^20 bytes.",
    )  # fmt: skip


def figure14(path: Path) -> Table | None:
    """What figure14.py measured; None where it has not been run."""
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as stream:
        header, *rows = list(csv.reader(stream))
    kept = ("model", "rows", "columns", "compression_rank", "compressor", "device", "smaller",
            "compress_gbit_per_second", "decompress_gbit_per_second")  # fmt: skip
    places = [header.index(name) for name in kept]
    return Table(
        ("model", "rows", "columns", "rank", "compressor", "device", "times smaller", "compress, Gbit/s",
         "decompress, Gbit/s"),
        tuple(tuple(_number(row[place]) for place in places) for row in rows),
        "Figure 14: throughput of compression",
        "Medians. Gbit/s of the gradient's slice, not of its factors; the paper's network carries 200.",
    )  # fmt: skip


def _peak(run: Run) -> tuple[float | None, str]:
    """(MB, what they are): of the GPU where there is one."""
    allocated = max(run.allocated.values(), default=0.0)
    if allocated > 0:
        return allocated, "GPU memory allocated"
    if run.resident:
        return max(run.resident.values()), "CPU: resident memory of the process, libraries included"
    return None, "not measured"


def _speedup(run: Run, runs: Sequence[Run]) -> float | None:
    """How many times faster than the same model's baseline."""
    for other in runs:
        if (other.model, other.variant) == (run.model, "baseline") and other.typical_seconds and run.typical_seconds:
            return other.typical_seconds / run.typical_seconds
    return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(text: str) -> Cell:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _for_people(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return (
            "0"
            if cell == 0
            else f"{cell:.3e}"
            if abs(cell) < 1e-3
            else f"{cell:,.4g}"
            if abs(cell) < 1e4
            else f"{cell:,.0f}"
        )
    return f"{cell:,}" if isinstance(cell, int) and cell >= 10_000 else str(cell)
