"""Blind test of the price's law: predictions are written and committed before the runs that measure the prices.

    python -m scripts.study.blind --predict                 # writes what the law predicts of prices not yet measured
    python -m scripts.study.blind                           # predictions beside prices; it trains nothing

A price is predicted if the format's energy is known and no run has measured the price yet; scripts.study.price says
which commands make both. The slope is the cell's own if at least two seeds were trained with half and twice the batch.
Otherwise it is read from a line through models that differ in their width alone. A written prediction is not changed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.report.table import printed
from scripts.experiments.models import MODELS, Model
from scripts.experiments.runs import add_row, commit, read_rows
from scripts.study import energies, grid
from scripts.study.law import Estimate, Known, Line
from scripts.study.price import (
    CELL,
    RUNS,
    Cell,
    Losses,
    Prediction,
    Predictions,
    Slopes,
    all_slopes,
    losses_of,
    mean_energies,
    price_of,
    table_of_laws,
    table_of_prices,
)

ROWS = grid.RUNS.with_name("price-predictions.csv")
COLUMNS = (*CELL, "format", "slope_of", "slope", "within", "slope_in_steps", "energy", "noise", "law", "commit")
"""Columns of the file: `slope_of` is "own", or says how many models the line goes through; `within` is half of the
slope's 95 % interval; `law` is the predicted price. Slopes and prices are in percent.
"""


def main(argv: Sequence[str]) -> int:
    """Write or show predictions; return the exit status of `scripts.study`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.blind", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--predict", action="store_true", help="write predictions of prices that are not measured")
    add("--rows", type=Path, default=RUNS, metavar="CSV", help=f"runs ({RUNS.name})")
    add("--energies", type=Path, default=energies.ROWS, metavar="CSV", help=f"energies ({energies.ROWS.name})")
    add("--predictions", type=Path, default=ROWS, metavar="CSV", help=f"predictions ({ROWS.name})")
    options = parser.parse_args(argv)
    return run_command(lambda: show(options), "predictions that were written are kept")


def show(options: argparse.Namespace) -> int:
    """Print the tables of all predictions; with --predict, write the missing ones first."""
    cells = losses_of(read_rows(options.rows, grid.COLUMNS))
    if options.predict:
        predict(options, cells)
    predicted = read(options.predictions)
    tables = [table_of_prices(cells, predicted, "Predicted before it was measured"), table_of_laws(cells, predicted)]
    print(printed(tables, "table"), end="")
    return 0


def predict(options: argparse.Namespace, cells: Mapping[Cell, Losses]) -> None:
    """Write a prediction for each format whose price is neither measured nor predicted."""
    slopes, written, unknown = all_slopes(cells), read(options.predictions), set[str]()
    for (cell, form), (energy, noise) in sorted(mean_energies(read_rows(options.energies, energies.COLUMNS)).items()):
        if (cell, form) in written or price_of(cells.get(cell, {}), form):
            continue
        if (found := slope_for(cell, slopes)) is None:
            unknown.add(", ".join(cell))
            continue
        slope, steps, source = found
        made = Prediction(Known(slope.mean, steps, energy, noise), slope.within)
        row = dict(zip(CELL, cell, strict=True)) | {
            "format": form, "slope_of": source, "slope": f"{slope.mean:.4f}", "within": f"{slope.within:.4f}",
            "slope_in_steps": "" if steps is None else f"{steps:.4f}", "energy": f"{energy:.4e}",
            "noise": f"{noise:.4f}", "law": f"{made.law:.5f}", "commit": commit(),
        }  # fmt: skip
        add_row(options.predictions, row, COLUMNS)
    for cell_in_words in sorted(unknown):
        print(
            f"{cell_in_words}: no slope. Train half-batch, double-batch and vanilla-nested with two seeds",
            file=sys.stderr,
        )


def read(path: Path) -> Predictions:
    """Read the predictions in a file."""
    return {
        (tuple(row[each] for each in CELL), row["format"]): Prediction(
            Known(
                float(row["slope"]), float(row["slope_in_steps"]) if row["slope_in_steps"] else None,
                float(row["energy"]), float(row["noise"]),
            ), float(row["within"])
        )
        for row in read_rows(path, COLUMNS)
    }  # fmt: skip


def slope_for(cell: Cell, slopes: Mapping[Cell, Slopes]) -> tuple[Estimate, float | None, str] | None:
    """Return S and S_T of a cell, and their source; None if too few runs are there.

    The slope of a single seed has no interval, so that no prediction is made of it.
    """
    if (own := slopes.get(cell)) and len(own.seeds) > 1:
        return own.batch, own.steps and own.steps.mean, "own"
    alike = [
        (MODELS[other[0]].hidden, found) for other, found in slopes.items()
        if other[1:] == cell[1:] and family(MODELS[other[0]]) == family(MODELS[cell[0]])
    ]  # fmt: skip
    width = MODELS[cell[0]].hidden
    batch = Line([(other, each) for other, found in alike for each in found.seeds])
    steps = Line([(other, each) for other, found in alike for each in found.in_steps])
    return (batch.at(width), steps.at(width).mean if steps.known else None, batch.source) if batch.known else None


def family(model: Model) -> Model:
    """Return a model without its width, and with the size of its heads in place of their number. It is the same for
    models that differ in their width alone.
    """
    return replace(model, hidden=0, heads=model.hidden // model.heads)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
