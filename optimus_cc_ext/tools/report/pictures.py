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

INK, AXIS, GRID = (TONES[name][0] for name in ("ink", "axis", "line"))
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


def loss_curves(title: str, losses: Mapping[str, Curve]) -> "Figure":
    """Draw one loss curve, or two."""
    figure, ((axes,),) = panels(1, 1, 5.8, 3.2)
    _draw_losses(axes, losses)
    tidy(axes, title, "both")
    axes.set_xlabel("iteration")
    return figure


def loss_difference(title: str, losses: Mapping[str, Curve], band: float | None = None) -> "Figure":
    """Draw the relative difference of two loss curves, which lie on each other where nothing is lost.

    Args:
        band: largest change of the first run's loss by other orders of the batches, as a fraction of the loss.
    """
    figure, ((axes,),) = panels(1, 1, 5.8, 3.2)
    _draw_gap(axes, losses, band)
    tidy(axes, title, "both")
    axes.set_xlabel("iteration")
    return figure


def differences(losses: Mapping[str, Curve]) -> dict[int, float]:
    """Return the relative difference of the second curve to the first one, at each iteration that both have."""
    old, new = (dict(zip(curve.iterations, curve.values, strict=True)) for curve in losses.values())
    return {step: new[step] / old[step] - 1 if old[step] else nan for step in sorted(old.keys() & new.keys())}


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

    (first, last), gaps = losses, differences(losses)
    finite = [gap for gap in gaps.values() if isfinite(gap)]
    axes.axhline(0, color=INK, lw=0.8)
    if band is not None:
        label = f"{first}, other order of batches"
        axes.axhspan(-band, band, color=PALETTE[0], alpha=0.15, lw=0, label=label)
    axes.plot(
        [*gaps], [*gaps.values()], color=PALETTE[1], marker="o" if len(gaps) < 30 else "", lw=1.4, ms=4, label=last
    )
    # The axis spans at least 1 %, so that a negligible difference looks negligible.
    axes.set_ylim(1.3 * min(-0.005, -(band or 0), *finite), 1.9 * max(0.005, band or 0, *finite))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"over {first}")
    axes.legend(frameon=False, fontsize="small", loc="upper right")


def curves(title: str, label: str, drawn: Mapping[str, Curve]) -> "Figure":
    """Draw curves over the iterations, from 0 up."""
    from matplotlib.ticker import MaxNLocator

    figure, ((axes,),) = panels(1, 1, 5.8, 3.2)
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
    traffic: Mapping[str, Sequence[Share]], band: float | None,
) -> "Figure":  # fmt: skip
    """Draw the gain in one picture: seconds, bytes, and the difference of the losses of two runs.

    Args:
        seconds: quartiles of the seconds per iteration, by condition (such as the rate of the links) and run.
        losses: loss curve of each run.
        traffic: bytes of each run by class, with the sum at the end.
        band: largest change of the first run's loss by other orders of the batches, as a fraction of the loss.
    """
    figure, ((time, sent, loss),) = panels(1, 3, 4.2, 3.4)
    for group, by_run in enumerate(seconds.values()):
        for place, (name, (lower, median, upper)) in enumerate(by_run.items()):
            x = group + 0.4 * (place - 0.5 * (len(by_run) - 1))
            time.bar(x, median, 0.36, color=PALETTE[place], label="" if group else name)
            time.vlines(x, lower, upper, color=INK, lw=1.2)
            time.text(x, upper, f"{median:.2f} s", ha="center", va="bottom", fontsize="small", color=INK)
    time.set_xticks(range(len(seconds)), list(seconds))
    time.set_ylim(0, 1.25 * max(upper for by_run in seconds.values() for *_, upper in by_run.values()))
    time.legend(frameon=False, fontsize="small", ncols=2)
    tidy(time, "Seconds of an iteration")
    for place, (name, shares) in enumerate(traffic.items()):
        total = shares[-1].sent / 1e6
        sent.bar(place, total, 0.6, color=PALETTE[[*losses].index(name)])
        sent.text(place, total, f"{total:.1f} MB", ha="center", va="bottom", fontsize="small", color=INK)
    sent.set_xticks(range(len(traffic)), list(traffic))
    sent.set_ylim(0, 1.12 * max(shares[-1].sent for shares in traffic.values()) / 1e6)
    tidy(sent, "MB sent in an iteration, all ranks")
    _draw_gap(loss, losses, band)
    loss.set_xlabel("iteration")
    tidy(loss, "Validation loss, difference", "both")
    for axes in (time, sent, loss):
        axes.xaxis.label.set_fontsize("small")
        axes.yaxis.label.set_fontsize("small")
    return figure
