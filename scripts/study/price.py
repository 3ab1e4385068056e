"""The law of the price beside the measured prices, from committed rows.

    python -m scripts.study.grid --rows docs/price-runs.csv --models llama --texts prose --iterations 160 \\
        --evaluations 8 --seeds 1,2,3 \\
        --variants vanilla-nested,half-batch,double-batch,vanilla,dp-int2,dp-int4,dp-int3,fewer-steps
    python -m scripts.study.energies
    python -m scripts.study.price                           # both tables; it trains nothing

The first command makes the runs of both slopes and of the prices, the second one the energies; int3 gets three seeds
more. A cell is a model, a layout, a text and a number of iterations; its predictions need no measured price.
"""

import argparse
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.report.table import Table, printed
from scripts.experiments.runs import read_rows
from scripts.experiments.variants import VANILLA
from scripts.study import energies, grid, law
from scripts.study.law import DOUBLE, FEWER, HALF, NESTED, NULL, Estimate

RUNS = grid.RUNS.with_name("price-runs.csv")
_CELL = ("model", "layout", "text", "iterations")
_PRICED = "dp-"
"""Start of the names of the variants that code gradients alone, before the name of the format."""

Cell = tuple[str, ...]
Losses = Mapping[str, Mapping[tuple[str, ...], float]]
"""Losses of a cell's runs by variant, and by seed, text and kind of CPU."""


@dataclass(frozen=True)
class Slopes:
    """Slopes of vanilla's loss in one cell, in percent, with intervals from the seeds."""

    batch: Estimate
    steps: Estimate | None
    """None if there are no runs with fewer steps."""


def main(argv: Sequence[str]) -> int:
    """Show the law; return the exit status of `scripts.study`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.price", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=RUNS, metavar="CSV", help=f"runs ({RUNS.name})")
    parser.add_argument(
        "--energies", type=Path, default=energies.ROWS, metavar="CSV", help=f"energies ({energies.ROWS.name})"
    )
    options = parser.parse_args(argv)
    return run_command(lambda: show(options.rows, options.energies), "nothing was written")


def show(rows: Path, of_energies: Path) -> int:
    """Print both tables of the rows that are there."""
    cells = losses_of(read_rows(rows, grid.COLUMNS))
    slopes = {cell: found for cell, runs in cells.items() if (found := slopes_of(runs))}
    measured = mean_energies(read_rows(of_energies, energies.COLUMNS))
    print(printed([table_of_slopes(slopes), table_of_prices(cells, slopes, measured)], "table"), end="")
    return 0


def losses_of(rows: Sequence[Mapping[str, Any]]) -> dict[Cell, Losses]:
    """Return the losses of all cells."""
    found: dict[Cell, dict[str, dict[tuple[str, ...], float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        same = (row["seed"], row["text_hash"], row["cpu"])
        found[tuple(str(row[each]) for each in _CELL)][row["variant"]][same] = float(row["loss"])
    return found


def paired(runs: Losses, *variants: str) -> list[tuple[float, ...]]:
    """Return the losses of these variants, for each seed that all of them have."""
    same = set.intersection(*(set(runs.get(each, ())) for each in variants))
    return [tuple(runs[each][seed] for each in variants) for seed in sorted(same)]


def slopes_of(runs: Losses) -> Slopes | None:
    """Return the slopes of a cell; None without runs at half and double batch."""
    batch = [law.slope_in_batch(*each) for each in paired(runs, HALF, DOUBLE, NESTED)]
    steps = [law.slope_in_steps(*each) for each in paired(runs, FEWER, NESTED)]
    return Slopes(Estimate.of(batch), Estimate.of(steps) if steps else None) if batch else None


def mean_energies(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Cell, str], tuple[float, float]]:
    """Return, for each cell and format, e2 and the noise's share of the energy, in the mean over the training.

    The mean weighs each point by the part of the training that it stands for: from halfway to the point before, to
    halfway to the one after.
    """
    points: dict[tuple[Cell, str], dict[float, tuple[float, float]]] = defaultdict(dict)
    for row in rows:
        cell = (row["model"], row["layout"], row["text"], row["of"])
        points[cell, row["format"]][float(row["point"])] = (float(row["energy"]), float(row["noise"]))
    return {
        key: (_mean(found, 0, float(key[0][3])), _mean(found, 1, float(key[0][3]))) for key, found in points.items()
    }


def _mean(points: Mapping[float, tuple[float, float]], place: int, end: float) -> float:
    known = sorted(points)
    edges = [0.0, *((low + high) / 2 for low, high in itertools.pairwise(known)), end]
    return sum(
        points[point][place] * (high - low) for point, (low, high) in zip(known, itertools.pairwise(edges), strict=True)
    ) / end  # fmt: skip


def table_of_slopes(slopes: Mapping[Cell, Slopes]) -> Table:
    """Make the table of slopes: S and S_T in percent for each e-fold."""
    rows = [
        (*cell, found.batch.seeds, found.batch.mean, found.batch.within,
         found.steps and found.steps.mean, found.steps and found.steps.within)
        for cell, found in sorted(slopes.items())
    ]  # fmt: skip
    columns = (*_CELL, "n", "S, %", "S within, %", "S_T, %", "S_T within, %")
    note = (
        "Percent of vanilla's loss for each e-fold of the batch, and of the steps, with the half of the 95 % interval."
    )
    return Table(columns, rows, "Slopes of vanilla's loss", note, name="slopes")


def table_of_prices(
    cells: Mapping[Cell, Losses],
    slopes: Mapping[Cell, Slopes],
    measured: Mapping[tuple[Cell, str], tuple[float, float]],
) -> Table:
    """Make the table of the law: for each format of each cell, what the law and its rivals predict, and the price."""
    rows = []
    for (cell, form), (energy, noise) in sorted(measured.items()):
        if (slope := slopes.get(cell)) is None:
            continue
        low, high = (law.price(end, energy) for end in slope.batch.ends)
        by_law = law.price(slope.batch.mean, energy)
        prices = [100 * (ours / plain - 1) for ours, plain in paired(cells[cell], _PRICED + form, VANILLA)]
        found = Estimate.of(prices) if prices else None
        rows.append((
            *cell, form, energy, by_law, low, high,
            law.by_noise(slope.batch.mean, energy, noise) if noise > 0 else math.nan,
            slope.steps and law.by_steps(slope.steps.mean, energy), NULL * energy,
            found and found.seeds, found and found.mean, found and found.within,
            None if found is None or found.seeds < 2 else "yes" if law.holds(by_law, found) else "no",
        ))  # fmt: skip
    columns = (
        *_CELL, "format", "e2", "law, %", "from, %", "to, %", "noise, %", "steps, %", "null, %", "n", "measured, %",
        "within, %", "holds",
    )  # fmt: skip
    note = (
        "The law's interval is that of its slope. It holds where it is within a factor of 1.5 of the measured mean, or"
        " inside the measured interval."
    )
    return Table(columns, rows, "Price of coded gradients", note, name="prices")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
