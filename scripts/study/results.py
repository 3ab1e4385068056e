"""Tables of a study's runs, and the picture of loss over bytes. `Results` has runs by (variant, seed)."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optimus_cc_ext.tools.report.table import Table
from scripts.experiments.variants import VANILLA

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

CONTROLS: Mapping[str, str] = {
    "one-ulp": "weights one ulp away",
    "other-order": "batches in another order",
    "noise-1e-6": "noise of 1e-6 on every gradient",
}
"""Names of the variants that train vanilla once more, with the difference between both vanilla runs."""

Results = Mapping[tuple[str, int], Mapping[str, Any]]


def differences(results: Results, variant: str, seeds: Sequence[int]) -> list[float]:
    """Return the percent over vanilla's validation loss, for each seed that has both runs."""
    pairs = [(results.get((variant, seed)), results.get((VANILLA, seed))) for seed in seeds]
    return [100 * (ours["validation loss"] / plain["validation loss"] - 1) for ours, plain in pairs if ours and plain]


def losses(results: Results, variants: Sequence[str], seeds: Sequence[int], title: str, note: str) -> Table:
    """Make the table of validation losses, and their paired differences from vanilla's with the same seed."""
    rows: list[tuple[Any, ...]] = []
    for variant in variants:
        found = [results.get((variant, seed)) for seed in seeds]
        over = differences(results, variant, seeds) if variant != VANILLA else []
        each = ", ".join(f"{difference:+.3f}" for difference in over)
        rows.append((variant, *(run["validation loss"] if run else None for run in found), *_mean(over), each))
    columns = ("variant", *(f"seed {seed}" for seed in seeds), "over vanilla, %", "standard error", "each, %")
    return Table(columns, rows, title, note, name="losses")


def _mean(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of `values` and its standard error, each None if there are too few values."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values) if values else None, error


def traffic(results: Results, variants: Sequence[str], seeds: Sequence[int]) -> Table:
    """Make the table of each variant's bytes over vanilla's, by class, and its median iteration, from the first seed
    with a run."""
    runs = {variant: _first(results, variant, seeds) for variant in variants}
    names = list(dict.fromkeys(name for run in runs.values() if run for name in run["bytes"]))
    rows: list[tuple[Any, ...]] = []
    for variant, run in runs.items():
        sent = (run["bytes"].get(name) if run else None for name in names)
        rows.append((variant, *(s[1] / s[0] if s and s[0] else None for s in sent), run["seconds"] if run else None))
    return Table(
        ("variant", *names, "seconds"), rows, title="Traffic, of vanilla's bytes", name="traffic",
        note="Seconds of an iteration (median) are this machine's.",
    )  # fmt: skip


def _first(results: Results, variant: str, seeds: Sequence[int]) -> Mapping[str, Any] | None:
    return next((results[variant, seed] for seed in seeds if (variant, seed) in results), None)


def spread(results: Results, seeds: Sequence[int]) -> dict[str, float]:
    """Return the spread of vanilla around itself, by control: the root mean square of the paired differences, in
    percent.
    """
    found = {control: differences(results, control, seeds) for control in CONTROLS}
    return {control: math.sqrt(statistics.fmean(d * d for d in each)) for control, each in found.items() if each}


def prices(results: Results, variants: Sequence[str], seeds: Sequence[int]) -> Table:
    """Make the picture's table: percent of vanilla's bytes, percent over its loss, standard error."""
    rows: list[tuple[Any, ...]] = []
    for variant in variants:
        over, run = differences(results, variant, seeds), _first(results, variant, seeds)
        if variant not in (VANILLA, *CONTROLS) and over and run:
            raw, sent = run["bytes"]["all traffic"]
            rows.append((variant, 100 * sent / raw, *_mean(over)))
    return Table(("variant", "sent, %", "over vanilla, %", "standard error"), rows, name="prices")


def draw_prices(table: Table, bands: Mapping[str, float], title: str) -> "Figure":
    """Draw `prices` as points, one for each variant, over vanilla's own spread."""
    # matplotlib is imported here: it takes a second, for which tables need not wait.
    from optimus_cc_ext.tools.report.pictures import AXIS, GRID, INK, PALETTE, colour, panels, tidy

    figure, ((axes,),) = panels(1, 1, 8.4, 5.2)
    for control, width in sorted(bands.items(), key=lambda item: -item[1]):
        shade = GRID if control == max(bands, key=lambda each: bands[each]) else AXIS
        label = f"vanilla against itself: {CONTROLS[control]} ({width:.2g} %)"
        axes.axhspan(-width, width, color=shade, alpha=0.55, lw=0, label=label)
    axes.axhline(0, color=INK, lw=0.8)
    labels = []
    for variant, sent, over, error in table.rows:
        bold = variant in ("balanced", "paper")
        paint = colour("compressed" if variant == "balanced" else "CB", 0) if bold else PALETTE[6]
        axes.errorbar(
            float(sent or 0), float(over or 0), yerr=error, fmt="o", ms=7 if bold else 5, capsize=3, color=paint,
            mfc=paint if error is not None else "white",
        )  # fmt: skip
        # The label goes to the side with more room; most variants that compress one class send nearly all bytes.
        side = 1 if float(sent or 0) < 60 else -1
        annotation = axes.annotate(
            str(variant), (float(sent or 0), float(over or 0)), xytext=(8 * side, 4), textcoords="offset points",
            ha="left" if side > 0 else "right", fontsize="small", color=paint, fontweight="bold" if bold else "normal",
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": paint, "shrinkA": 0, "relpos": (float(side < 0), 0.5)},
        )  # fmt: skip
        labels.append(annotation)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_yticks([-0.1, 0, 0.1, 0.2, 0.5, 1, 2, 5], ["-0.1", "0", "0.1", "0.2", "0.5", "1", "2", "5"])
    ends = [float(over or 0) + sign * float(error or 0) for *_, over, error in table.rows for sign in (-1, 1)]
    axes.set_ylim(1.3 * min([-0.1, *ends]), 1.5 * max([0.1, *ends]))
    axes.set_xlim(0, 108)
    axes.set_xlabel("bytes sent, % of vanilla's, all classes")
    axes.set_ylabel("validation loss over vanilla's, %")
    if bands:
        axes.legend(frameon=False, fontsize="small", loc="lower right")
    tidy(axes, title, "both")
    axes.grid(visible=True, axis="y", which="minor", color=GRID, lw=0.4)
    figure.draw_without_rendering()  # drawing lays the picture out, so that the area of each label is known
    move_apart(labels)
    return figure


def move_apart(labels: Sequence["Annotation"]) -> None:
    """Raise each label until it covers no point, and no label of a lower one."""
    placed = [_around(label) for label in labels]
    for label in sorted(labels, key=lambda label: float(label.xy[1])):
        while any(extent_of(label).overlaps(other) for other in placed):
            sideways, up = label.xyann
            label.xyann = (sideways, up + 2)
        placed.append(extent_of(label))


def _around(label: "Annotation") -> "Bbox":
    """Return the area of a label's point, in pixels, with the marks drawn there."""
    from matplotlib.transforms import Bbox

    radius = 4 * label.axes.figure.dpi / 72  # type: ignore[union-attr]
    x, y = label.axes.transData.transform(label.xy)  # type: ignore[union-attr]
    return Bbox.from_extents(x - radius, y - radius, x + radius, y + radius)


def extent_of(label: "Annotation") -> "Bbox":
    """Return the area of a label's text, in pixels, without the line to its point."""
    from matplotlib.text import Text

    label.get_window_extent()  # the first call computes the position of the text
    return Text.get_window_extent(label)
