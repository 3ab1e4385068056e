"""The law of the price beside the measured prices, from committed rows.

    python -m scripts.study.grid --rows docs/price-runs.csv --models llama-h256 --texts python --layout pp1dp2 \\
        --iterations 80 --interval 10 --evaluations 4 --seeds 1,2,3 \\
        --variants vanilla-nested,half-batch,double-batch,fewer-steps,vanilla,dp-int4,dp-int3,dp-int2,dp-shaped
    python -m scripts.study.energies --models llama-h256 --layout pp1dp2 --points 10,30,55,80
    python -m scripts.study.price                           # the tables; it trains nothing

The first command makes the runs of both slopes and of the prices, the second one the energies; int3 gets three seeds
more. A cell is a model, a layout, a text and a number of iterations; its predictions need no measured price.
"""

import argparse
import itertools
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
from scripts.study.law import DOUBLE, FEWER, HALF, LAWS, NESTED, Estimate, Known

RUNS = grid.RUNS.with_name("price-runs.csv")
CELL = ("model", "layout", "text", "iterations")
PRICED = "dp-"
"""Start of the names of the variants that code gradients alone, before the name of the format."""

_RIVALS = ("noise", "steps", "null")

Cell = tuple[str, ...]
Losses = Mapping[str, Mapping[tuple[str, ...], float]]
"""Losses of a cell's runs by variant, and by seed, text and kind of CPU."""


@dataclass(frozen=True)
class Slopes:
    """Slopes of vanilla's loss in one cell, in percent, with intervals from the seeds."""

    seeds: Sequence[float]
    """S, one value for each seed."""

    in_steps: Sequence[float]
    """S_T, one value for each seed that was also trained with fewer steps."""

    @property
    def batch(self) -> Estimate:
        """Mean of S over the seeds."""
        return Estimate.of(self.seeds)

    @property
    def steps(self) -> Estimate | None:
        """Mean of S_T over the seeds; None if no seed was trained with fewer steps."""
        return Estimate.of(self.in_steps) if self.in_steps else None


@dataclass(frozen=True)
class Prediction:
    """The law applied to one format in one cell."""

    known: Known
    within: float
    """Half of the 95 % interval of S, in percent."""

    @property
    def law(self) -> float:
        """Predicted price, in percent of vanilla's loss."""
        return law.price(self.known.batch, self.known.energy)

    @property
    def ends(self) -> tuple[float, float]:
        """Predicted prices at both ends of the interval of S."""
        slope, energy = self.known.batch, self.known.energy
        return law.price(slope - self.within, energy), law.price(slope + self.within, energy)


Predictions = Mapping[tuple[Cell, str], Prediction]
"""Predictions by cell and format."""


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
    """Print the tables of the rows that are there."""
    cells = losses_of(read_rows(rows, grid.COLUMNS))
    slopes = all_slopes(cells)
    means = mean_energies(read_rows(of_energies, energies.COLUMNS))
    formats = predictions(slopes, means)
    # The energy of the control's error follows from that of the noise.
    control = {(cell, "shaped"): (law.SHAPED**2 * noise, noise) for (cell, _), (_, noise) in means.items()}
    tables = [
        table_of_slopes(slopes), table_of_prices(cells, predictions(slopes, means | control)),
        table_of_laws(cells, formats),
    ]  # fmt: skip
    print(printed(tables, "table"), end="")
    return 0


def losses_of(rows: Sequence[Mapping[str, Any]]) -> dict[Cell, Losses]:
    """Return the losses of all cells."""
    found: dict[Cell, dict[str, dict[tuple[str, ...], float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        same = (row["seed"], row["text_hash"], row["cpu"])
        found[tuple(str(row[each]) for each in CELL)][row["variant"]][same] = float(row["loss"])
    return found


def paired(runs: Losses, *variants: str) -> list[tuple[float, ...]]:
    """Return the losses of these variants, for each seed that all of them have."""
    same = set.intersection(*(set(runs.get(each, ())) for each in variants))
    return [tuple(runs[each][seed] for each in variants) for seed in sorted(same)]


def all_slopes(cells: Mapping[Cell, Losses]) -> dict[Cell, Slopes]:
    """Return the slopes of the cells that have runs for them."""
    return {cell: found for cell, runs in cells.items() if (found := slopes_of(runs))}


def slopes_of(runs: Losses) -> Slopes | None:
    """Return the slopes of a cell; None without runs at half and double batch."""
    batch = [law.slope_in_batch(*each) for each in paired(runs, HALF, DOUBLE, NESTED)]
    steps = [law.slope_in_steps(*each) for each in paired(runs, FEWER, NESTED)]
    return Slopes(batch, steps) if batch else None


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
    columns = (*CELL, "n", "S, %", "S within, %", "S_T, %", "S_T within, %")
    note = (
        "Percent of vanilla's loss for each e-fold of the batch, and of the steps, with the half of the 95 % interval."
    )
    return Table(columns, rows, "Slopes of vanilla's loss", note, name="slopes")


def predictions(slopes: Mapping[Cell, Slopes], measured: Mapping[tuple[Cell, str], tuple[float, float]]) -> Predictions:
    """Return what the law predicts of each format in each cell with slopes and energies of its own."""
    return {
        (cell, form): Prediction(
            Known(found.batch.mean, found.steps and found.steps.mean, energy, noise), found.batch.within
        )
        for (cell, form), (energy, noise) in sorted(measured.items()) if (found := slopes.get(cell))
    }  # fmt: skip


def price_of(runs: Losses, form: str) -> Estimate | None:
    """Return the measured price of a format in one cell, in percent; None without pairs of runs."""
    prices = [100 * (ours / plain - 1) for ours, plain in paired(runs, PRICED + form, VANILLA)]
    return Estimate.of(prices) if prices else None


def table_of_prices(
    cells: Mapping[Cell, Losses], predicted: Predictions, title: str = "Price of coded gradients"
) -> Table:
    """Make the table of the law: for each format of each cell, what the law and its rivals predict, and the price."""
    rows = []
    for (cell, form), each in predicted.items():
        found = price_of(cells.get(cell, {}), form)
        rows.append((
            *cell, form, each.known.energy, each.law, *each.ends,
            *(rule(each.known) for name, rule in LAWS.items() if name in _RIVALS),
            found and found.seeds, found and found.mean, found and found.within, found and found.errors,
            None if found is None or found.seeds < 2 else "yes" if law.holds(each.law, found) else "no",
        ))  # fmt: skip
    columns = (
        *CELL, "format", "e2", "law, %", "from, %", "to, %", *(f"{name}, %" for name in _RIVALS), "n", "measured, %",
        "within, %", "errors", "holds",
    )  # fmt: skip
    note = (
        "The law's interval is that of its slope. It holds where it is within a factor of 1.5 of the measured mean, or"
        " inside the measured interval. Errors: the mean over its standard error."
    )
    return Table(columns, rows, title, note, name="prices")


def table_of_laws(cells: Mapping[Cell, Losses], predicted: Predictions) -> Table:
    """Make the table that counts, for each law, the measured prices by which it holds."""
    measured = {key: found for key in predicted if (found := price_of(cells.get(key[0], {}), key[1]))}
    judged = {key: found for key, found in measured.items() if found.seeds > 1}
    prices = {
        name: {key: rule(predicted[key].known) for key in judged} for name, rule in LAWS.items()
    } | {
        # A mutation: the energy of the next coarser format of the cell.
        "a coarser format's energy": {
            key: min((other.law for (cell, _), other in predicted.items()
                      if cell == key[0] and other.known.energy > predicted[key].known.energy), default=None)
            for key in judged
        },
    }  # fmt: skip
    rows = []
    for name, found in prices.items():
        known = {key: value for key, value in found.items() if value is not None}
        rows.append((
            name, len(known), sum(law.near(value, judged[key]) for key, value in known.items()),
            sum(law.holds(value, judged[key]) for key, value in known.items()),
        ))  # fmt: skip
    note = "Of the prices that are measured with two seeds or more and that the law can predict."
    return Table(("law", "prices", "within 1.5", "hold"), rows, "Laws beside the measured prices", note, name="laws")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
