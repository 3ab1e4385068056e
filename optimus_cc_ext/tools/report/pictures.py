"""The palette and style of all pictures, and the pictures that several reports share."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from textwrap import wrap
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


def label(name: str) -> str:
    """Return a name, such as that of a user's folder, as matplotlib's text. matplotlib takes dollar signs for formulas,
    leaves a name with an underscore in front out of a legend, and breaks no lines.
    """
    text = "\n".join(wrap(name, 32) or [name]).replace("$", r"\$")
    return f"\N{ZERO WIDTH SPACE}{text}" if text.startswith("_") else text


def marked(values: Sequence[float]) -> list[int]:
    """Return the places of the values that a line of them has to mark: all of a few, else those without a neighbour,
    because a line has no place to go from one finite value between others.
    """
    if len(values) < 30:
        return list(range(len(values)))
    known = [False, *map(isfinite, values), False]
    return [place for place in range(len(values)) if known[place : place + 3] == [False, True, False]]


def panels(rows: int, columns: int, width: float, height: float, **further: Any) -> "tuple[Figure, list[list[Axes]]]":
    """Return a figure and its `rows` x `columns` axes of the given size in inches; `further` goes to
    Figure.subplots.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **further).tolist()


def side_by_side(count: int, width: float, height: float, **further: Any) -> "tuple[Figure, list[Axes]]":
    """Return a figure and `count` axes of the given size in inches, two in a row, so that a phone shows their words."""
    figure, rows = panels(-(-count // 2), min(count, 2), width, height, **further)
    axes = [each for row in rows for each in row]
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def tidy(axes: "Axes", title: str = "", grid: Literal["x", "y", "both"] = "y") -> None:
    """Give `axes` a title at the left, a grid behind the data, and no box."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize="medium", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(colors=INK, length=3, labelsize="small", which="both")
    axes.grid(axis=grid, color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def lines(axes: "Axes", table: Table, x: str, y: str, by: str, style: str = "-", form: str = "{}") -> None:
    """Draw column `y` over column `x`, one line per value of column `by`, which `form` formats."""
    for place, name in enumerate(table.distinct(by)):
        mine = table.where(**{by: name})
        axes.plot(
            mine.numbers(x), mine.numbers(y), ls=style, lw=1.6, marker="o", markevery=marked(mine.numbers(y)), ms=3.5,
            color=colour(name, place), label=form.format(name),
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
        axes.plot(
            curve.iterations, curve.values, label=label(name), color=PALETTE[place], alpha=alpha, lw=width,
            marker="o", markevery=marked(curve.values), ms=2 * width,
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
        other = label(f"{first}, other order of batches")
        axes.axhspan(-band, band, color=PALETTE[0], alpha=0.15, lw=0, label=other)
    axes.plot(
        [*gaps], [*gaps.values()], color=PALETTE[1], marker="o", markevery=marked([*gaps.values()]), lw=1.4, ms=4,
        label=label(last),
    )  # fmt: skip
    # The axis spans at least 1 %, so that a negligible difference looks negligible.
    axes.set_ylim(1.3 * min(-0.005, -(band or 0), *finite), 1.9 * max(0.005, band or 0, *finite))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(label(f"over {first}"))
    axes.legend(frameon=False, fontsize="small", loc="upper right")


def curves(title: str, unit: str, drawn: Mapping[str, Curve]) -> "Figure":
    """Draw curves over the iterations, from 0 up."""
    from matplotlib.ticker import MaxNLocator

    figure, ((axes,),) = panels(1, 1, 5.8, 3.2)
    for place, (name, curve) in enumerate(drawn.items()):
        # As with losses, the first of several is wider, so that it is seen where they coincide.
        width = 3.2 if place == 0 and len(drawn) > 1 else 1.4
        axes.plot(
            curve.iterations, curve.values, label=label(name), color=PALETTE[place % len(PALETTE)], lw=width,
            marker="o", markevery=marked(curve.values), ms=2 * width,
        )  # fmt: skip
    axes.set(xlabel="iteration", ylabel=unit, ylim=(0, None))
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
            time.bar(x, median, 0.36, color=PALETTE[place], label="" if group else label(name))
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
    sent.set_xticks(range(len(traffic)), [label(name) for name in traffic])
    sent.set_ylim(0, 1.12 * max(shares[-1].sent for shares in traffic.values()) / 1e6)
    tidy(sent, "MB sent in an iteration, all ranks")
    _draw_gap(loss, losses, band)
    loss.set_xlabel("iteration")
    tidy(loss, "Validation loss, difference", "both")
    for axes in (time, sent, loss):
        axes.xaxis.label.set_fontsize("small")
        axes.yaxis.label.set_fontsize("small")
    return figure
