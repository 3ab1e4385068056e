"""The pictures: both loss curves with their difference below, and the traffic by class."""

import base64
import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from optimus_cc_ext.quickstart.event_log import Curve
from optimus_cc_ext.quickstart.report import Outcome, relative, shares
from optimus_cc_ext.quickstart.workspace import PICTURES

__all__ = ["draw", "save_png", "svg_data_uri"]

VANILLA, COMPRESSED = "#3b6fb6", "#e07b1f"
_RAW, _INK, _GRID = "#c9d1da", "#24292f", "#e7eaee"
_PNG_DPI = 160


def draw(outcome: Outcome) -> dict[str, Figure]:
    """One figure for each name in `PICTURES`."""
    vanilla, compressed = outcome.vanilla, outcome.compressed
    figures = (
        _losses("Training loss", vanilla.training, compressed.training, marker=""),
        _losses("Validation loss", vanilla.validation, compressed.validation, marker="o"),
        _traffic(outcome),
    )
    return dict(zip(PICTURES, figures, strict=True))


def save_png(figure: Figure, path: Path) -> None:
    """Write `figure` for slides and mails."""
    figure.savefig(path, format="png", dpi=_PNG_DPI)


def svg_data_uri(figure: Figure) -> str:
    """`figure` as a URI that holds the whole picture, sharp at any size."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def _losses(title: str, vanilla: Curve, compressed: Curve, marker: str) -> Figure:
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.15))
    # The line below is wider, so that both can be seen where they coincide.
    above.plot(
        vanilla.iterations, vanilla.values, color=VANILLA, label="vanilla", marker=marker, lw=3.2, ms=6, alpha=0.75
    )
    above.plot(
        compressed.iterations, compressed.values, color=COMPRESSED, label="compressed", marker=marker, lw=1.4, ms=3.5
    )
    above.set_title(title, loc="left", fontweight="bold", color=_INK)
    above.set_ylabel("nats per token")
    above.legend(frameon=False)

    both = set(vanilla.iterations) & set(compressed.iterations)
    old = dict(zip(vanilla.iterations, vanilla.values, strict=True))
    new = dict(zip(compressed.iterations, compressed.values, strict=True))
    steps = sorted(both)
    gaps = [relative(new[step], old[step]) for step in steps]
    below.axhline(0, color=_INK, lw=0.8)
    below.plot(steps, gaps, color=COMPRESSED, marker=marker, lw=1.4, ms=3.5)
    # At least 1 % high: a difference of nothing must look like nothing.
    below.set_ylim(1.15 * min(-0.005, *gaps), 1.15 * max(0.005, *gaps))
    below.yaxis.set_major_formatter(PercentFormatter(1.0))
    below.yaxis.set_major_locator(MaxNLocator(4))
    below.set_ylabel("compressed\nagainst vanilla")
    below.set_xlabel("iteration")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        _tidy(axes, "both")
    figure.align_ylabels()
    return figure


def _traffic(outcome: Outcome) -> Figure:
    *classes, everything = shares(outcome.compressed)
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    places = range(len(classes))
    raw, sent = [share.raw / 1e6 for share in classes], [share.sent / 1e6 for share in classes]
    axes.barh([place - 0.2 for place in places], raw, height=0.36, color=_RAW, label="raw: what vanilla sends")
    axes.barh([place + 0.2 for place in places], sent, height=0.36, color=COMPRESSED, label="sent, compressed")
    margin = max(raw) / 90
    for place, share in enumerate(classes):
        axes.text(share.raw / 1e6 + margin, place - 0.2, f"{share.raw / 1e6:.2f} MB", va="center", color="#57606a")
        axes.text(
            share.sent / 1e6 + margin, place + 0.2, f"{share.sent / 1e6:.2f} MB  ({share.ratio:.1%})",
            va="center", color=_INK, fontweight="bold",
        )  # fmt: skip
    axes.set_yticks(places, [share.name for share in classes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(raw))
    axes.set_xlabel("MB per iteration, all ranks together")
    axes.set_title(
        f"Traffic: {everything.sent / 1e6:.1f} of {everything.raw / 1e6:.1f} MB sent ({everything.ratio:.1%})",
        loc="left", fontweight="bold", color=_INK,
    )  # fmt: skip
    axes.legend(frameon=False, loc="upper right")  # where the pipeline's bars are short
    _tidy(axes, "x")
    return figure


def _tidy(axes: Axes, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b6bec8")
    axes.tick_params(colors=_INK, length=3)
    axes.grid(axis=grid, color=_GRID, lw=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
