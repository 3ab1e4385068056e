"""Files of a plan or a sweep: CSV, JSON, and one page with pictures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimus_cc_ext.tools.plan.iteration import CLASSES, breakdown
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.variants import Variant
from optimus_cc_ext.tools.report.document import Box, Folded, Number, Part, Picture, Points, ReportDocument
from optimus_cc_ext.tools.report.pictures import AXIS, INK, PALETTE, colour, panels, side_by_side, tidy
from optimus_cc_ext.tools.report.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_plan", "write_sweep"]

_LEAD = (
    "Predicted, not measured. Computation and links were compared with published runs. No public run tests the costs "
    "and gains of compression, so every gain has a band."
)


def write_plan(
    folder: Path, job: Job, found: Sequence[Variant], chosen: Variant, tables: Sequence[Table], lines: Sequence[str]
) -> None:
    """Write index.html, plan.csv, plan.json and the pictures."""
    plain, best, pays = found[0].result.seconds, chosen.gain, chosen.name != "vanilla"
    numbers = [
        Number("vanilla", f"{plain:.3f} s", "per iteration"),
        Number("best", f"{chosen.result.seconds:.3f} s" if pays else "-", chosen.name if pays else "nothing pays"),
        Number("gain", f"{100 * best.planned:.1f} %", f"{100 * best.least:.1f} to {100 * best.most:.1f} %"),
    ]
    breakdown_here, gains_here = tables[0], tables[1]
    pictures = [
        Picture("gains", _gains(found), gains_here.in_words(["variant"], ["gain %", "from %", "to %"])),
        Picture("breakdown", _breakdowns(job, found), breakdown_here.in_words([""], breakdown_here.columns[1:])),
    ]
    said = Box("The answer", [Points.of([line for line in lines if not line.startswith(" ")])])
    constants = Folded("Constants, with their sources", {"plan": "\n".join(line for line in lines if line[:1] == " ")})
    parts: list[Part] = [Box("", numbers, "grid"), said, Box("", pictures, "grid wide"), *tables, constants]
    ReportDocument("A plan", _LEAD, parts).write(folder, page="index.html")
    content = {table.title: table.records() for table in tables}
    (folder / "plan.json").write_text(json.dumps({"lines": list(lines), **content}, indent=1) + "\n")


def write_sweep(folder: Path, table: Table, names: Sequence[str]) -> None:
    """Write index.html, sweep.csv, sweep.json and a picture of the gains of the fastest layout over the
    number of GPUs.
    """
    figure, axes = side_by_side(len(table.distinct("link")), 3.4, 3.0, sharey=True)
    fastest = {(row["link"], row["nodes"]): place for place, row in reversed([*enumerate(table.records())])}
    drawn = Table(table.columns, [table.rows[place] for place in sorted(fastest.values())])
    for ax, link in zip(axes, table.distinct("link"), strict=True):
        line = drawn.where(link=link)
        for place, name in enumerate(names):
            gains, shade = line.numbers(f"{name}: gain %"), colour(name, place)
            ax.plot(line.numbers("GPUs"), gains, marker="o", ms=3.5, lw=1.6, color=shade, label=name)
        ax.set_xscale("log", base=2)
        ax.axhline(0, color=INK, lw=0.8)
        ax.set_xlabel("GPUs")
        tidy(ax, str(link), "both")
    axes[0].set_ylabel("% of vanilla's time saved")
    axes[0].legend(frameon=False, fontsize="small")
    words = drawn.in_words(["link", "GPUs"], [f"{name}: gain %" for name in names])
    ReportDocument("A sweep", _LEAD, [Picture("gains", figure, words), table]).write(folder, page="index.html")
    (folder / "sweep.json").write_text(json.dumps(table.records(), indent=1) + "\n")


def _gains(found: Sequence[Variant]) -> "Figure":
    others = found[1:]
    figure, ((axes,),) = panels(1, 1, 6.4, 0.9 + 0.28 * max(1, len(others)))
    for place, v in enumerate(others):
        shade = {"pays": PALETTE[2], "does not pay": PALETTE[3]}.get(v.gain.verdict, PALETTE[6])
        band = [100 * v.gain.least, 100 * v.gain.most]
        axes.plot(band, [place, place], color=shade, lw=5, alpha=0.45, solid_capstyle="butt")
        axes.plot(100 * v.gain.planned, place, "o", color=shade, ms=6)
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_yticks(range(len(others)), [v.name for v in others])
    axes.invert_yaxis()
    axes.set_xlabel("% of vanilla's time saved, with band")
    tidy(axes, "Gain", "x")
    return figure


def _breakdowns(job: Job, found: Sequence[Variant]) -> "Figure":
    figure, ((axes,),) = panels(1, 1, 6.4, 1.3 + 0.28 * len(found))
    left = [0.0] * len(found)
    parts = [breakdown(job, v.result) for v in found]
    for place, name in enumerate(CLASSES):
        widths = [max(0.0, part[name]) for part in parts]
        axes.barh(
            range(len(found)), widths, left=left, height=0.7, label=name,
            color=(*PALETTE, AXIS)[place % (len(PALETTE) + 1)],
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(found)), [v.name for v in found])
    axes.invert_yaxis()
    axes.set_xlabel("seconds that nothing hides")
    axes.legend(frameon=False, fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.12))
    tidy(axes, "Where the seconds go", "x")
    return figure
