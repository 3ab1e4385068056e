"""The paper's figures, drawn from their tables."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tables import Cell, Table

__all__ = ["draw_breakdown", "draw_error_statistics", "draw_learning_curves", "draw_memory", "draw_throughput"]

# By the variant, so that one technique has one colour in all figures.
_COLOURS = {
    "Baseline": "#8a94a0",
    "CB without LEP": "#c2453d",
    "CB": "#3b6fb6",
    "CB+LEP": "#2a9d8f",
    "CB+FE": "#e0a21f",
    "CB+FE+SC": "#e07b1f",
}
_OTHER = ("#3b6fb6", "#e07b1f", "#2a9d8f", "#c2453d")
_INK, _GRID = "#24292f", "#e7eaee"
_DPI = 150


def draw_learning_curves(table: Table, path: Path) -> None:
    """Figure 9: validation perplexity by iteration, and by training time."""
    models = _in_order(row[0] for row in table.rows)
    figure, grid = _grid(2, len(models), 4.6, 3.3)
    for column, model in enumerate(models):
        for axes, place, label in ((grid[0][column], 2, "iteration"), (grid[1][column], 3, "hours of training")):
            for number, variant in enumerate(_in_order(row[1] for row in table.rows if row[0] == model)):
                rows = [row for row in table.rows if row[:2] == (model, variant)]
                axes.plot(
                    [_value(row[place]) for row in rows], [_value(row[5]) for row in rows],
                    color=_colour(variant, number), label=variant, lw=1.6, marker="o" if len(rows) < 30 else "", ms=3.5,
                )  # fmt: skip
            axes.set_yscale("log")
            axes.set_xlabel(label)
            axes.yaxis.set_major_formatter("{x:.4g}")
            axes.yaxis.set_minor_formatter("{x:.4g}")
            _tidy(axes, f"{model}: validation perplexity" if place == 2 else "")
        grid[0][column].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        grid[1][column].xaxis.set_major_locator(MaxNLocator(5))
        grid[0][column].legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw_breakdown(table: Table, path: Path) -> None:
    """Figure 10: the time of an iteration, with what compressing takes of it."""

    def parts(row: tuple[Cell, ...]) -> list[tuple[str, float]]:
        return [("CB", _value(row[4])), ("SC", _value(row[5]))]

    _bars(table, path, "ms per iteration (dark: compressing)", value=2, parts=parts, remark=_as_speedup)


def draw_memory(table: Table, path: Path) -> None:
    """Figure 12: peak memory."""
    _bars(table, path, "peak MB on a rank", value=2, parts=lambda row: [], remark=_as_increase)


def draw_error_statistics(table: Table, path: Path) -> None:
    """Figure 11: cosine and averages by iteration, a line for each stage."""
    # Errors are of gradients, differences of activations: they lie orders of magnitude apart, hence a panel for each.
    panels = (
        (3, "Cosine between errors and activation differences"),
        (4, "Average of the errors"),
        (5, "Average of the activation differences"),
    )
    figure, grid = _grid(3, 1, 7.2, 2.3)
    for (axes,), (place, title) in zip(grid, panels, strict=True):
        for number, stage in enumerate(_in_order(row[2] for row in table.rows)):
            rows = [row for row in table.rows if row[2] == stage]
            iterations, values = ([_value(row[index]) for row in rows] for index in (1, place))
            colour, few = _OTHER[number % len(_OTHER)], "o" if len(rows) < 30 else ""
            axes.plot(iterations, values, color=colour, lw=1.3, marker=few, ms=3, label=f"stage {stage}")
        axes.axhline(0, color=_INK, lw=0.7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _tidy(axes, title)
    # The whole range: what is nearly nothing must look like nothing.
    grid[0][0].set_ylim(-1, 1)
    grid[0][0].legend(frameon=False, fontsize=8, ncols=4)
    grid[2][0].set_xlabel("iteration")
    _save(figure, path)


def draw_throughput(table: Table, path: Path) -> None:
    """Figure 14: Gbit/s by rank."""
    models = _in_order(row[0] for row in table.rows)
    figure, grid = _grid(1, len(models), 4.2, 3.6)
    for axes, model in zip(grid[0], models, strict=True):
        for number, compressor in enumerate(_in_order(row[4] for row in table.rows)):
            rows = [row for row in table.rows if row[0] == model and row[4] == compressor]
            for place, style, what in ((7, "-", "compress"), (8, "--", "decompress")):
                ranks, throughput = ([_value(row[index]) for row in rows] for index in (3, place))
                colour = _OTHER[number % len(_OTHER)]
                axes.plot(ranks, throughput, ls=style, marker="o", ms=3.5, color=colour, label=f"{compressor}, {what}")
        axes.set_yscale("log")
        axes.set_xlabel("rank")
        axes.set_ylabel("Gbit/s")
        rows = [row for row in table.rows if row[0] == model]
        _tidy(axes, f"{model}: {rows[0][1]} x {rows[0][2]}, {rows[0][5]}")
    grid[0][0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _bars(
    table: Table,
    path: Path,
    label: str,
    value: int,
    parts: Callable[[tuple[Cell, ...]], list[tuple[str, float]]],
    remark: Callable[[tuple[Cell, ...]], str],
) -> None:
    """A group of bars for each model; `parts` are drawn dark at a bar's foot, `remark` stands on top of it."""
    models = _in_order(row[0] for row in table.rows)
    figure, grid = _grid(1, len(models), 4.2, 3.8)
    for axes, model in zip(grid[0], models, strict=True):
        rows = [row for row in table.rows if row[0] == model]
        for place, row in enumerate(rows):
            height = _value(row[value])
            axes.bar(place, height, color=_colour(row[1], place), width=0.66)
            foot = 0.0
            for _, part in parts(row):
                axes.bar(place, part, bottom=foot, color=_INK, alpha=0.55, width=0.66)
                foot += part
            axes.text(place, height, f"{height:,.4g}\n{remark(row)}", ha="center", va="bottom", fontsize=8, color=_INK)
        axes.set_xlim(-0.6, max(3, len(rows) - 1) + 0.6)
        axes.set_xticks(range(len(rows)), [str(row[1]).replace("+", "+\n", 1) for row in rows], fontsize=8)
        axes.set_ylim(0, 1.22 * max((_value(row[value]) for row in rows), default=1.0) or 1.0)
        axes.set_ylabel(label)
        _tidy(axes, str(model))
    _save(figure, path)


def _as_speedup(row: tuple[Cell, ...]) -> str:
    return "" if row[3] is None else f"{_value(row[3]):.2f}x"


def _as_increase(row: tuple[Cell, ...]) -> str:
    return "" if row[3] is None else f"{_value(row[3]):+.1f} %"


def _grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=_DPI)


def _tidy(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, which="both")
    axes.grid(axis="y", color=_GRID, lw=0.8)
    axes.set_axisbelow(True)


def _colour(variant: Cell, number: int) -> str:
    return _COLOURS.get(str(variant), _OTHER[number % len(_OTHER)])


def _in_order(values: Iterable[Cell]) -> list[Cell]:
    """Each value once."""
    return list(dict.fromkeys(values))


def _value(cell: Cell) -> float:
    return float("nan") if cell is None or isinstance(cell, str) else float(cell)
