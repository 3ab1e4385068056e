"""The plots: time against rate, recovered share against its bound, bytes by class."""

from collections.abc import Sequence
from pathlib import Path

from cluster_model import VANILLA
from cluster_network import UNSHAPED, bits_per_second
from cluster_results import Row
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw"]

_COLOURS = ("#3b6fb6", "#e07b1f", "#4b9b5f", "#b0413e", "#7b5ea7", "#8c6d46", "#c66ba8", "#5f6b76", "#a5a52f")
_CLASSES = {
    "pipeline forward": "#9aa7b4", "pipeline backward": "#3b6fb6", "DP gradients": "#e07b1f", "embedding": "#4b9b5f",
}  # fmt: skip
_INK, _GRID = "#24292f", "#e7eaee"
_DPI = 140


def draw(table: Sequence[Row], folder: Path) -> list[Path]:
    """Three pictures for each model and layout, as PNG in `folder`."""
    paths = []
    for model, layout in dict.fromkeys((row.model, row.layout) for row in table):
        here = [row for row in table if (row.model, row.layout) == (model, layout)]
        variants = list(dict.fromkeys(row.variant for row in here))
        colours = {variant: _COLOURS[place % len(_COLOURS)] for place, variant in enumerate(variants)}
        title = f"{model}, {layout}"
        figures = {"time": _time(here, colours, title), "bytes": _bytes(here, title)}
        if any(row.recovered is not None for row in here):
            figures["recovered"] = _recovered(here, colours, title)
        for name, figure in figures.items():
            path = folder / f"{name}_{model}_{layout}.png"
            figure.savefig(path, dpi=_DPI)
            paths.append(path)
    return paths


def _time(table: Sequence[Row], colours: dict[str, str], title: str) -> Figure:
    """Unshaped links stand at the right end, behind a gap."""
    figure, axes = _figure(f"Seconds per iteration, {title}")
    rates = sorted({row.rate for row in table}, key=bits_per_second)
    places = {rate: float(place) for place, rate in enumerate(rates)}
    if UNSHAPED in places:
        places[UNSHAPED] += 0.4
    for variant, colour in colours.items():
        rows = sorted((row for row in table if row.variant == variant), key=lambda row: places[row.rate])
        x = [places[row.rate] for row in rows]
        median = [row.seconds.median for row in rows]
        below = [row.seconds.median - row.seconds.lower for row in rows]
        above = [row.seconds.upper - row.seconds.median for row in rows]
        axes.errorbar(x, median, yerr=(below, above), color=colour, marker="o", ms=5, lw=1.8, capsize=3, label=variant)
    axes.set_xticks([places[rate] for rate in rates], [_named(rate) for rate in rates])
    axes.set_xlabel("rate of every link, both ways")
    axes.set_ylabel("seconds (median, quartiles)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def _recovered(table: Sequence[Row], colours: dict[str, str], title: str) -> Figure:
    figure, axes = _figure(f"Share of the exposed communication that is recovered, {title}")
    shown = [row for row in table if row.recovered is not None]
    rates = sorted({row.rate for row in shown}, key=bits_per_second)
    variants = [variant for variant in colours if variant != VANILLA]
    width = 0.8 / max(len(variants), 1)
    for place, variant in enumerate(variants):
        rows = {row.rate: row for row in shown if row.variant == variant}
        x = [number + (place - (len(variants) - 1) / 2) * width for number, rate in enumerate(rates) if rate in rows]
        present = [rows[rate] for rate in rates if rate in rows]
        heights = [100 * (row.recovered or 0.0) for row in present]
        axes.bar(x, heights, 0.9 * width, color=colours[variant], label=variant)
        for left, row in zip(x, present, strict=True):
            if row.bound is not None:
                ends = (left - 0.45 * width, left + 0.45 * width)
                label = (
                    "bound (schedule with these bytes, compression for nothing)" if (place, left) == (0, x[0]) else None
                )
                axes.plot(ends, [100 * row.bound] * 2, color=_INK, lw=2, label=label)
            for share in row.recovered_by_block.values():
                axes.plot([left], [100 * share], marker="o", ms=3, color=_INK, alpha=0.6)
    axes.axhline(0, color=_INK, lw=0.8)
    axes.set_xticks(range(len(rates)), [_named(rate) for rate in rates])
    axes.set_xlabel("rate of every link, both ways; dots: single blocks")
    axes.set_ylabel("%")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def _bytes(table: Sequence[Row], title: str) -> Figure:
    rate = min((row.rate for row in table), key=bits_per_second)
    figure, axes = _figure(f"Bytes an iteration at {_named(rate)}, all hosts, {title}")
    rows = [row for row in table if row.rate == rate]
    bottoms = [0.0] * len(rows)
    for name, colour in _CLASSES.items():
        heights = [row.traffic.get(name, (0.0, 0.0))[0] / 1e6 for row in rows]
        if not any(heights):
            continue
        axes.bar(range(len(rows)), heights, 0.6, bottom=bottoms, color=colour, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    payload = [sum(row.payload_by_host) / 1e6 for row in rows]
    axes.scatter(range(len(rows)), payload, marker="_", s=900, color=_INK, label="kernel's payload", zorder=3)
    axes.set_xticks(range(len(rows)), [row.variant for row in rows])
    axes.set_ylabel("MB")
    axes.legend(frameon=False, fontsize="small")
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontweight="bold", color=_INK, fontsize="medium")
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _named(rate: str) -> str:
    if rate == UNSHAPED:
        return "unshaped"
    for unit in ("kbit", "mbit", "gbit"):
        if rate.endswith(unit):
            return f"{rate.removesuffix(unit)} {unit[0].upper() if unit != 'kbit' else 'k'}bit/s"
    return rate
