"""Plots of the paper's figures, drawn from their tables."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from optimus_cc_ext.tools.report.pictures import INK, colour, lines, panels, side_by_side, tidy
from optimus_cc_ext.tools.report.table import Table

LEARNING = ("iteration", "training hours", "validation perplexity")
BREAKDOWN = ("ms per iteration", "speedup", "CB, ms", "SC, ms")
STATISTICS = ("cosine", "mean error", "mean activation difference")
MEMORY = ("peak, MB", "more than baseline, %")
THROUGHPUT = ("rank", "compress, Gbit/s", "decompress, Gbit/s")
"""Columns that each picture shows."""


def learning_curves(table: Table) -> Figure:
    """Draw figure 9: validation perplexity by iteration, and by training time."""
    models = table.distinct("model")
    figure, grid = panels(len(models), 2, 3.4, 2.8)
    for row, model in zip(grid, models, strict=True):
        for place, x in enumerate(("iteration", "training hours")):
            axes = row[place]
            lines(axes, table.where(model=model), x, "validation perplexity", by="variant")
            axes.set(yscale="log", xlabel=x)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=not place))
            axes.yaxis.set_major_formatter("{x:.4g}")
            axes.yaxis.set_minor_formatter("{x:.4g}")
            tidy(axes, "" if place else f"{model}: validation perplexity")
        row[0].legend(frameon=False, fontsize="small")
    return figure


def breakdown(table: Table) -> Figure:
    """Draw figure 10: the time of an iteration, with the part of it that compression takes."""
    label = "ms per iteration (foot: compressing)"
    return _bars(table, "ms per iteration", label, ("CB, ms", "SC, ms"), "speedup", "{:.2f}x")


def memory(table: Table) -> Figure:
    """Draw figure 12: peak memory."""
    return _bars(table, "peak, MB", "peak MB on a rank", (), "more than baseline, %", "{:+.1f} %")


def error_statistics(table: Table) -> Figure:
    """Draw figure 11: cosine and averages by iteration, a line for each stage."""
    # Each quantity has a panel of its own: errors are of gradients, differences of activations, and they lie orders of
    # magnitude apart.
    figure, grid = panels(3, 1, 6.8, 2.3)
    for (axes,), name in zip(grid, STATISTICS, strict=True):
        lines(axes, table, "iteration", name, by="stage", form="stage {}")
        axes.axhline(0, color=INK, lw=0.7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes, "cosine between errors and activation differences" if name == "cosine" else name)
    # The axis goes from -1 to 1, so that a cosine near 0 looks small.
    grid[0][0].set_ylim(-1, 1)
    grid[0][0].legend(frameon=False, fontsize="small", ncols=4)
    grid[2][0].set_xlabel("iteration")
    return figure


def throughput(table: Table) -> Figure:
    """Draw figure 14: Gbit/s by compression rank."""
    models = table.distinct("model")
    figure, row = side_by_side(len(models), 3.4, 3.2)
    for axes, model in zip(row, models, strict=True):
        mine = table.where(model=model)
        for style, work in (("-", "compress"), ("--", "decompress")):
            lines(axes, mine, "rank", f"{work}, Gbit/s", by="compressor", style=style, form=f"{{}}, {work}")
        axes.set(yscale="log", xlabel="rank", ylabel="Gbit/s")
        _, rows, columns, _, _, device, *_ = mine.rows[0]
        tidy(axes, f"{model}: {rows} x {columns}, {device}")
    row[0].legend(frameon=False, fontsize="small")
    return figure


def _bars(table: Table, height: str, label: str, parts: tuple[str, ...], remark: str, form: str) -> Figure:
    """Draw a group of bars for each model; columns `parts` are at a bar's foot, `remark` stands on its top."""
    models = table.distinct("model")
    figure, row = side_by_side(len(models), 3.4, 3.4)
    for axes, model in zip(row, models, strict=True):
        mine = table.where(model=model)
        heights, names = mine.numbers(height), mine.column("variant")
        axes.bar(range(len(names)), heights, color=[colour(*each[::-1]) for each in enumerate(names)], width=0.66)
        feet = [0.0] * len(names)
        for part in parts:
            values = [0.0 if value != value else value for value in mine.numbers(part)]
            axes.bar(range(len(names)), values, bottom=feet, color=INK, alpha=0.55, width=0.66)
            feet = [foot + value for foot, value in zip(feet, values, strict=True)]
        for place, (top, value) in enumerate(zip(heights, mine.numbers(remark), strict=True)):
            text = f"{top:,.4g}\n{'' if value != value else form.format(value)}"
            axes.text(place, top, text, ha="center", va="bottom", fontsize="small", color=INK)
        axes.set_xlim(-0.6, max(3, len(names) - 1) + 0.6)
        axes.set_xticks(range(len(names)), [str(name).replace("+", "+\n", 1) for name in names])
        axes.set_ylim(0, 1.22 * max((top for top in heights if top == top), default=1.0))
        axes.set_ylabel(label)
        tidy(axes, str(model))
    return figure
