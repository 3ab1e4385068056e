"""Cells of the study of several models and texts: paired differences, their 95 % bounds, and the rule of a preset."""

import dataclasses
import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from optimus_cc_ext.tools.report.table import Table
from scripts.experiments.variants import VANILLA

LAST = 4
"""Number of validations whose mean is a run's loss."""

LIMIT, MEAN_LIMIT = 0.05, 0.03
"""A variant passes if the one-sided 95 % upper bound of every cell is below LIMIT percent over vanilla's loss, and the
mean of all cells is at most MEAN_LIMIT percent. Only cells of at least `JUDGED` seeds count. A cell whose bound is
above LIMIT and whose mean is below it is undecided.
"""

JUDGED = 3
"""Smallest number of seeds with which a cell is judged. The table of losses also shows cells of fewer seeds."""

Row = Mapping[str, Any]
"""Finished run, as a mapping from column names to values."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """Losses of one variant beside those of vanilla, for one model, text, layout and number of iterations."""

    model: str
    text: str
    layout: str
    iterations: int
    variant: str
    differences: tuple[float, ...]
    """For each seed, the variant's loss minus vanilla's, in percent of vanilla's."""

    behind: tuple[float, ...] = ()
    """For each seed, the number of iterations by which vanilla reached the variant's loss earlier."""

    @property
    def mean(self) -> float:
        """Mean of `differences` over all seeds, in percent of vanilla's loss."""
        return statistics.fmean(self.differences)


def compared(rows: Sequence[Row]) -> list[Cell]:
    """Compare every run with the run of vanilla that has the same settings, text and kind of CPU.

    Returns one cell for each variant on each model, text, layout and number of iterations.
    """
    same = ("settings", "text_hash", "cpu")
    vanilla = {tuple(row[name] for name in same): row for row in rows if row["variant"] == VANILLA}
    found: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        plain = vanilla.get(tuple(row[name] for name in same))
        if row["variant"] != VANILLA and plain:
            cell = tuple(str(row[name]) for name in ("model", "text", "layout", "iterations", "variant"))
            loss = float(row["loss"])
            found[cell].append((100 * (loss / float(plain["loss"]) - 1), behind(str(plain["validations"]), loss)))
    return [Cell(model, text, layout, int(iterations), variant, *zip(*pairs, strict=True))
            for (model, text, layout, iterations, variant), pairs in sorted(found.items())]  # fmt: skip


def behind(validations: str, loss: float) -> float:
    """Return by how many iterations vanilla reached `loss` before its end; negative if vanilla would need more
    iterations, and NaN if its curve does not tell.

    Args:
        validations: vanilla's, as iteration:loss. The curve is the mean of `LAST` successive ones.
    """
    points = [(int(iteration), float(value)) for iteration, value in (each.split(":") for each in validations.split())]
    curve = [
        (points[end - 1][0], statistics.fmean(value for _, value in points[end - LAST : end]))
        for end in range(LAST, len(points) + 1)
    ]
    for (before, higher), (after, lower) in reversed(list(itertools.pairwise(curve))):
        if max(lower, loss) < higher or loss == higher > lower:
            return curve[-1][0] - after + (loss - lower) * (after - before) / (higher - lower)
    return math.nan


def upper_bound(cell: Cell) -> float:
    """Return the one-sided 95 % upper bound of a cell's mean difference, in percent; NaN without two seeds.

    The deviation is that of the cell's own differences. Deviations of models differ up to thirtyfold, so that a common
    one would make the bound of a quiet model too high and that of a noisy one too low.
    """
    seeds = len(cell.differences)
    if seeds < 2:
        return math.nan
    return cell.mean + student(seeds - 1) * statistics.stdev(cell.differences) / math.sqrt(seeds)


@functools.cache
def student(freedom: int, tail: float = 0.05) -> float:
    """Return the value that Student's t distribution exceeds with the probability `tail`."""
    # mpmath is installed with torch, which needs sympy.
    from mpmath import betainc, findroot

    def beyond(t: float) -> Any:
        return betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True) / 2 - tail

    return float(findroot(beyond, (1.0, 8.0), solver="anderson"))


def losses(cells: Sequence[Cell]) -> Table:
    """Make the table of paired differences, one row for each cell and variant."""
    rows = []
    for cell in cells:
        each = ", ".join(f"{difference:+.3f}" for difference in cell.differences)
        rows.append((
            cell.model, cell.text, cell.layout, cell.iterations, cell.variant, len(cell.differences), cell.mean,
            upper_bound(cell), _mean_of_known(cell.behind), each,
        ))  # fmt: skip
    columns = (
        "model", "text", "layout", "iterations", "variant", "n", "mean, %", "95 % below, %", "iterations behind",
        "each, %",
    )  # fmt: skip
    note = (
        "Percent over vanilla's loss with the same seed. A bound comes from the deviation of its own row."
        " Iterations behind: vanilla reached the loss so many iterations before its end."
    )
    return Table(columns, rows, "Losses", note, name="losses")


def _mean_of_known(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else None


def verdicts(cells: Sequence[Cell]) -> Table:
    """Make the table of verdicts: each variant's worst bound, mean over the judged cells, and if the variant passes."""
    rows = []
    for variant in sorted({cell.variant for cell in cells}):
        every = [cell for cell in cells if cell.variant == variant]
        ours = [cell for cell in every if len(cell.differences) >= JUDGED]
        worst = max((upper_bound(cell) for cell in ours), default=math.nan)
        mean = statistics.fmean(cell.mean for cell in ours) if ours else math.nan
        undecided = sum(upper_bound(cell) >= LIMIT > cell.mean for cell in ours)
        if worst < LIMIT and mean <= MEAN_LIMIT:
            passes = "yes"
        else:
            passes = "undecided" if mean <= MEAN_LIMIT and all(cell.mean < LIMIT for cell in ours) else "no"
        rows.append((variant, len(ours), len(every) - len(ours), undecided, worst, mean, passes))
    columns = ("variant", "cells", "not judged", "undecided", "worst bound, %", "mean, %", "passes")
    note = (
        f"A variant passes if every bound is below {LIMIT} % and the mean of all cells is at most {MEAN_LIMIT} %."
        f" A cell is undecided if its bound is above {LIMIT} % and its mean is not."
        f" Cells with fewer than {JUDGED} seeds are not judged."
    )
    return Table(columns, rows, "Verdicts", note, name="verdicts")
