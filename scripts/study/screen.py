"""Price of a format over its squared rounding error, from the finished runs of the screen.

    python -m scripts.study.screen --rows docs/study-runs.csv --output results/screen

The error is the relative error of a message of Gaussian values. The line through 0 is fitted to the mean prices of the
formats, not to the control, whose noise has no structure.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.report.document import Picture, ReportDocument
from optimus_cc_ext.tools.report.table import Table
from scripts.experiments.models import ExperimentError
from scripts.experiments.runs import read_rows
from scripts.study.cells import Cell, compared, upper_bound
from scripts.study.grid import COLUMNS, RUNS
from scripts.study.in_formats import ROWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTROL = "noise-int4"
FORMAT_OF: Mapping[str, str] = {
    CONTROL: "int4", "int8-forward": "int4", "int5": "int5", "int6": "int6", "int8": "int8",
}  # fmt: skip
"""Format of all data-parallel gradients of each variant."""


def main(argv: Sequence[str]) -> int:
    """Print the table, and draw the picture."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.screen", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=RUNS, metavar="CSV", help="file of the finished runs")
    parser.add_argument(
        "--output", type=Path, default=Path("results/screen"), metavar="DIR", help="folder (%(default)s)"
    )
    for name, default in (("model", "llama"), ("text", "python"), ("layout", "pp2dp2")):
        parser.add_argument(f"--{name}", default=default, help="(%(default)s)")
    parser.add_argument("--iterations", type=int, default=160, metavar="N", help="(%(default)s)")
    options = parser.parse_args(argv)
    return run_command(lambda: screen(options), "")


def screen(options: argparse.Namespace) -> int:
    """Show the prices of the chosen cell.

    Raises:
        ExperimentError: there is no finished pair.
    """
    wanted = (options.model, options.text, options.layout, options.iterations)
    cells = [
        cell for cell in compared(read_rows(options.rows, COLUMNS))
        if (cell.model, cell.text, cell.layout, cell.iterations) == wanted and cell.variant in FORMAT_OF
    ]  # fmt: skip
    if not cells:
        raise ExperimentError(
            f"--rows {options.rows}: no pair of {', '.join(map(str, wanted))}. Run scripts.study.grid"
        )
    table = prices(cells)
    figure = draw(table, f"{options.model}, {options.iterations} iterations")
    words = table.in_words(["variant"], ["squared error, %^2", "price, %", "95 % below, %"])
    picture = Picture("screen", figure, words)
    document = ReportDocument("", "", [table, picture])
    print(table.markdown())
    document.write(options.output)
    return 0


def prices(cells: Sequence[Cell]) -> Table:
    """Make the table: squared error of a message, price and its bound, and price over squared error."""
    rows = []
    for cell in sorted(cells, key=lambda cell: list(FORMAT_OF).index(cell.variant)):
        error = {**FORMATS, **ROWS}[FORMAT_OF[cell.variant]].gaussian_error
        squared = 1e4 * error**2  # in squares of a percent, as the price is in percent
        bound = upper_bound(cell)
        rows.append((cell.variant, len(cell.differences), squared, cell.mean, bound, cell.mean / squared))
    columns = ("variant", "n", "squared error, %^2", "price, %", "95 % below, %", "price over squared error")
    return Table(columns, rows, "Price of a format", "Errors are of a message, prices of the loss.", name="screen")


def slope(table: Table) -> float:
    """Return the price of a squared error of 1, fitted to the formats by least squares, through 0."""
    points = [
        (squared, price) for variant, squared, price in
        zip(table.column("variant"), table.numbers("squared error, %^2"), table.numbers("price, %"), strict=True)
        if variant != CONTROL
    ]  # fmt: skip
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)


def draw(table: Table, title: str) -> "Figure":
    """Draw prices over squared errors, with their one-sided bounds and the line through 0."""
    from optimus_cc_ext.tools.report.pictures import INK, panels, tidy

    figure, ((axes,),) = panels(1, 1, 6.4, 4.2)
    columns = (table.numbers(name) for name in ("squared error, %^2", "price, %", "95 % below, %"))
    for variant, squared, price, bound in zip(table.column("variant"), *columns, strict=True):
        filled = variant != CONTROL
        axes.errorbar(
            squared, price, yerr=[[0], [bound - price]], fmt="o", capsize=3, color=INK, mfc=INK if filled else "white"
        )
        axes.annotate(str(variant), (squared, price), xytext=(6, -12), textcoords="offset points", fontsize="small")
    most = max(table.numbers("squared error, %^2"))
    axes.plot([0, most], [0, slope(table) * most], color=INK, lw=0.8)
    axes.set_xlabel("squared relative error of a message, in percent squared")
    axes.set_ylabel("validation loss over vanilla's, %")
    tidy(axes, title, "both")
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
