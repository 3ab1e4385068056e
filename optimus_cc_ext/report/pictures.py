"""One palette and one look for all pictures, and the kinds of pictures that more than one report has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from optimus_cc_ext.report.record import Curve, Share
from optimus_cc_ext.report.table import Cell, Table

__all__ = ["GRID", "INK", "PALETTE", "colour", "lines", "loss_curves", "panels", "save", "tidy", "traffic_bars"]

PALETTE = ("#3b6fb6", "#e07b1f", "#2a9d8f", "#c2453d", "#7b5ea7", "#e0a21f", "#5f6b76", "#c66ba8", "#8c6d46")
INK, GRID, _FAINT = "#24292f", "#e7eaee", "#c9d1da"
_OF = {
    name: PALETTE[place]
    for place, names in enumerate((
        ("vanilla", "Baseline"), ("compressed", "CB+FE+SC"), ("CB+LEP",), ("CB without LEP",), ("CB",), ("CB+FE",),
    ))
    for name in names
}  # fmt: skip
"""One variant has one colour in all pictures."""

_DPI = 150


def colour(name: Cell, place: int) -> str:
    """That of the variant `name`; of any other the one at `place`."""
    return _OF.get(str(name), PALETTE[place % len(PALETTE)])


def panels(rows: int, columns: int, width: float, height: float, **further: Any) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `rows` x `columns` axes, each so large, in inches; `further` is for Figure.subplots."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **further).tolist()


def tidy(axes: Axes, title: str = "", grid: Literal["x", "y", "both"] = "y") -> None:
    """A title at the left, a grid behind what is drawn, no box."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize="medium", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b6bec8")
    axes.tick_params(colors=INK, length=3, labelsize="small", which="both")
    axes.grid(axis=grid, color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def save(figure: Figure, folder: Path, name: str) -> None:
    """`name`.png for slides and mails, `name`.svg for pages."""
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"{name}.{suffix}", dpi=_DPI)


def lines(axes: Axes, table: Table, x: str, y: str, by: str, style: str = "-", label: str = "{}") -> None:
    """Column `y` over column `x`, a line for each value in column `by`; `label` is formatted with the value."""
    for place, name in enumerate(table.distinct(by)):
        mine = table.where(**{by: name})
        axes.plot(
            mine.numbers(x), mine.numbers(y), ls=style, lw=1.6, marker="o" if len(mine.rows) < 30 else "", ms=3.5,
            color=colour(name, place), label=label.format(name),
        )  # fmt: skip


def loss_curves(title: str, vanilla: Curve, compressed: Curve) -> Figure:
    """Both curves, and below how far the compressed run's is above the other."""
    figure, ((above,), (below,)) = panels(2, 1, 7.2, 2.3, sharex=True, height_ratios=(3, 1.15))
    marker = "o" if len(vanilla.values) < 30 else ""
    # The line below is wider, so that both can be seen where they coincide.
    for name, curve, width, alpha in (("vanilla", vanilla, 3.2, 0.75), ("compressed", compressed, 1.4, 1.0)):
        above.plot(
            curve.iterations, curve.values, label=name, color=colour(name, 0), alpha=alpha,
            lw=width, marker=marker, ms=2 * width,
        )  # fmt: skip
    above.set_ylabel("nats per token")
    above.legend(frameon=False)

    old, new = (dict(zip(curve.iterations, curve.values, strict=True)) for curve in (vanilla, compressed))
    steps = sorted(old.keys() & new.keys())
    gaps = [new[step] / old[step] - 1 for step in steps]
    below.axhline(0, color=INK, lw=0.8)
    below.plot(steps, gaps, color=colour("compressed", 0), marker=marker, lw=1.4, ms=2.8)
    # At least 1 % high: a difference of nothing must look like nothing.
    below.set_ylim(1.15 * min(-0.005, *gaps), 1.15 * max(0.005, *gaps))
    below.yaxis.set_major_formatter(PercentFormatter(1.0))
    below.yaxis.set_major_locator(MaxNLocator(4))
    below.set_ylabel("compressed\nagainst vanilla")
    below.set_xlabel("iteration")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(above, title, "both")
    tidy(below, grid="both")
    figure.align_ylabels()
    return figure


def traffic_bars(shares: Sequence[Share]) -> Figure:
    """Raw and sent bytes by class; the last of `shares` is their sum, and stands in the title."""
    *classes, everything = shares
    figure, ((axes,),) = panels(1, 1, 7.2, 4.2)
    margin = max(share.raw for share in classes) / 9e7
    for place, share in enumerate(classes):
        raw, sent = share.raw / 1e6, share.sent / 1e6
        raw_bar = axes.barh(place - 0.2, raw, height=0.36, color=_FAINT)
        sent_bar = axes.barh(place + 0.2, sent, height=0.36, color=colour("compressed", 0))
        axes.text(raw + margin, place - 0.2, f"{raw:.2f} MB", va="center", color="#57606a")
        axes.text(
            sent + margin, place + 0.2, f"{sent:.2f} MB  ({share.ratio:.1%})",
            va="center", color=INK, fontweight="bold",
        )  # fmt: skip
    axes.set_yticks(range(len(classes)), [share.name for share in classes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * 90 * margin)
    axes.set_xlabel("MB per iteration, all ranks together")
    # Where the pipeline's bars are short.
    axes.legend((raw_bar, sent_bar), ("raw: what vanilla sends", "sent, compressed"), frameon=False, loc="upper right")
    title = f"Traffic: {everything.sent / 1e6:.1f} of {everything.raw / 1e6:.1f} MB sent ({everything.ratio:.1%})"
    tidy(axes, title, "x")
    return figure
