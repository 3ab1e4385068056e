"""The palette and style of all pictures, and the pictures that several reports share."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, Literal

from optimus_cc_ext.tools.report.record import Curve, Share
from optimus_cc_ext.tools.report.style import TONES
from optimus_cc_ext.tools.report.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = tuple(
    TONES[name][0] for name in ("blue", "orange", "teal", "red", "purple", "yellow", "grey", "pink", "brown")
)
SHADES = tuple(TONES[f"shade-{place}"][0] for place in range(1, 5))
"""Four tones of one hue, for what has an order."""

INK, DIM, AXIS, GRID, _FAINT = (TONES[name][0] for name in ("ink", "dim", "axis", "line", "faint"))
_COLOURS = {
    name: PALETTE[place]
    for place, names in enumerate((
        ("vanilla", "Baseline"), ("compressed", "CB+FE+SC"), ("CB+LEP",), ("CB without LEP",), ("CB",), ("CB+FE",),
    ))
    for name in names
}  # fmt: skip
"""The colour of each named variant, the same in all pictures."""


def colour(name: Cell, place: int) -> str:
    """Return the colour of the variant `name`, or for an unknown name the colour number `place` of the palette."""
    return _COLOURS.get(str(name), PALETTE[place % len(PALETTE)])


def panels(rows: int, columns: int, width: float, height: float, **further: Any) -> "tuple[Figure, list[list[Axes]]]":
    """Return a figure and its `rows` x `columns` axes of the given size in inches; `further` goes to
    Figure.subplots.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **further).tolist()


def tidy(axes: "Axes", title: str = "", grid: Literal["x", "y", "both"] = "y") -> None:
    """Give `axes` a title at the left, a grid behind the data, and no box."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize="medium", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(colors=INK, length=3, labelsize="small", which="both")
    axes.grid(axis=grid, color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def lines(axes: "Axes", table: Table, x: str, y: str, by: str, style: str = "-", label: str = "{}") -> None:
    """Draw column `y` over column `x`, one line per value of column `by`, which `label` formats."""
    for place, name in enumerate(table.distinct(by)):
        mine = table.where(**{by: name})
        axes.plot(
            mine.numbers(x), mine.numbers(y), ls=style, lw=1.6, marker="o" if len(mine.rows) < 30 else "", ms=3.5,
            color=colour(name, place), label=label.format(name),
        )  # fmt: skip


def loss_curves(title: str, losses: Mapping[str, Curve], band: float | None = None) -> "Figure":
    """Draw one loss curve, or two with their relative difference below.

    Args:
        band: largest change of the first run's loss by other orders of the batches, as a fraction of the loss.
    """
    ratios = {"height_ratios": (3, 1.15)} if len(losses) == 2 else {}
    figure, rows = panels(len(losses), 1, 7.2, 4.6 / len(losses), sharex=True, **ratios)
    _draw_losses(rows[0][0], losses)
    tidy(rows[0][0], title, "both")
    if len(losses) == 2:
        _draw_gap(rows[1][0], losses, band)
        tidy(rows[1][0], grid="both")
    rows[-1][0].set_xlabel("iteration")
    figure.align_ylabels()
    return figure


def _draw_losses(axes: "Axes", losses: Mapping[str, Curve]) -> None:
    from matplotlib.ticker import MaxNLocator

    # The curve drawn first is wider, so that both are visible where they coincide.
    for place, (name, curve) in enumerate(losses.items()):
        width, alpha = ((3.2, 0.75), (1.4, 1.0))[place or len(losses) == 1]
        marker = "o" if len(curve.values) < 30 else ""
        axes.plot(
            curve.iterations, curve.values, label=name, color=PALETTE[place], alpha=alpha, lw=width, marker=marker,
            ms=2 * width,
        )  # fmt: skip
    axes.set_ylabel("nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)


def _draw_gap(axes: "Axes", losses: Mapping[str, Curve], band: float | None) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    (first, base), (_, curve) = losses.items()
    old, new = (dict(zip(c.iterations, c.values, strict=True)) for c in (base, curve))
    steps = sorted(old.keys() & new.keys())
    gaps = [new[step] / old[step] - 1 if old[step] else nan for step in steps]
    finite = [gap for gap in gaps if isfinite(gap)]
    axes.axhline(0, color=INK, lw=0.8)
    if band is not None:
        axes.axhspan(-band, band, color=PALETTE[0], alpha=0.15, lw=0, label=f"{first}, batches in another order")
        axes.legend(frameon=False, fontsize="x-small", loc="upper right")
    axes.plot(steps, gaps, color=PALETTE[1], marker="o" if len(steps) < 30 else "", lw=1.4, ms=2.8)
    # The axis spans at least 1 %, so that a negligible difference looks negligible.
    axes.set_ylim(1.15 * min(-0.005, -(band or 0), *finite), 1.15 * max(0.005, band or 0, *finite))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_ylabel("difference")  # the legend names the runs, because a name can be longer than this axis


def curves(title: str, label: str, drawn: Mapping[str, Curve]) -> "Figure":
    """Draw curves over the iterations, from 0 up."""
    from matplotlib.ticker import MaxNLocator

    figure, ((axes,),) = panels(1, 1, 7.2, 3.2)
    for place, (name, curve) in enumerate(drawn.items()):
        marker = "o" if len(curve.values) < 30 else ""
        shade = PALETTE[place % len(PALETTE)]
        axes.plot(curve.iterations, curve.values, label=name, color=shade, lw=1.4, marker=marker, ms=3)
    axes.set(xlabel="iteration", ylabel=label, ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize="small", ncols=2)
    tidy(axes, title)
    return figure


def gain(
    seconds: Mapping[str, Mapping[str, tuple[float, float, float]]], losses: Mapping[str, Curve],
    traffic: Mapping[str, Sequence[Share]],
) -> "Figure":  # fmt: skip
    """Draw the gain in one picture: seconds, loss and bytes of two runs side by side.

    Args:
        seconds: quartiles of the seconds per iteration, by condition (such as the rate of the links) and run.
        losses: loss curve of each run.
        traffic: bytes of each run by class, with the sum at the end.
    """
    figure, ((time, loss, sent),) = panels(1, 3, 4.2, 3.6)
    for group, by_run in enumerate(seconds.values()):
        for place, (name, (lower, median, upper)) in enumerate(by_run.items()):
            x = group + 0.4 * (place - 0.5 * (len(by_run) - 1))
            time.bar(x, median, 0.36, color=PALETTE[place], label="" if group else name)
            time.vlines(x, lower, upper, color=INK, lw=1.2)
            time.text(x, upper, f"{median:.2f} s", ha="center", va="bottom", fontsize="small", color=INK)
    time.set_xticks(range(len(seconds)), list(seconds))
    time.set_ylim(0, 1.18 * max(upper for by_run in seconds.values() for *_, upper in by_run.values()))
    time.legend(frameon=False, fontsize="small")
    tidy(time, "Seconds per iteration")
    _draw_losses(loss, losses)
    loss.set_xlabel("iteration")
    tidy(loss, "Validation loss", "both")
    for place, shares in enumerate(traffic.values()):
        foot = 0.0
        for kind, share in enumerate(shares[:-1]):
            shade = PALETTE[2 + kind % (len(PALETTE) - 2)]
            sent.bar(place, share.sent / 1e6, 0.6, bottom=foot, color=shade, label="" if place else share.name)
            foot += share.sent / 1e6
        sent.text(place, foot, f"{foot:.1f} MB", ha="center", va="bottom", fontsize="small", color=INK)
    sent.set_xticks(range(len(traffic)), list(traffic))
    sent.set_ylim(0, 1.12 * max(shares[-1].sent for shares in traffic.values()) / 1e6)
    sent.legend(frameon=False, fontsize="small")
    tidy(sent, "Sent per iteration, all ranks")
    return figure


def traffic_bars(name: str, shares: Sequence[Share]) -> "Figure":
    """Draw raw and sent bytes of run `name` by class; the last of `shares` is the sum, which the title states."""
    *classes, everything = shares
    figure, ((axes,),) = panels(1, 1, 7.2, 4.2)
    margin = max(share.raw for share in classes) / 9e7
    for place, share in enumerate(classes):
        raw, sent = share.raw / 1e6, share.sent / 1e6
        raw_bar = axes.barh(place - 0.2, raw, height=0.36, color=_FAINT)
        sent_bar = axes.barh(place + 0.2, sent, height=0.36, color=PALETTE[1])
        axes.text(raw + margin, place - 0.2, f"{raw:.2f} MB", va="center", color=DIM)
        axes.text(
            sent + margin, place + 0.2, f"{sent:.2f} MB  ({share.ratio:.1%})",
            va="center", color=INK, fontweight="bold",
        )  # fmt: skip
    axes.set_yticks(range(len(classes)), [share.name for share in classes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * 90 * margin)
    axes.set_xlabel("MB per iteration, all ranks together")
    # The upper right corner is free, because the bars of pipeline traffic are short.
    axes.legend((raw_bar, sent_bar), ("raw: sent by vanilla", f"sent, {name}"), frameon=False, loc="upper right")
    title = f"Traffic: {everything.sent / 1e6:.1f} of {everything.raw / 1e6:.1f} MB sent ({everything.ratio:.1%})"
    tidy(axes, title, "x")
    return figure
