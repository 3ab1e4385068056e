"""Files of a grid of plans: a page on which a reader chooses a point, CSV, and a picture."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from optimus_cc_ext.tools.data.output import write_whole
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.report.document import Fragment, Picture, ReportDocument
from optimus_cc_ext.tools.report.pictures import INK, SHADES, panels, tidy
from scripts.planned.grid import PlanGrid

__all__ = ["check_grid_file", "grid_picture", "write_grids"]

LEAD = (
    "Planned, not measured: no training on several GPUs of a cluster has been timed. A band is the range of the gain "
    "if lines reach 3/4 to 4/3 of their rate, compression costs half to twice what is assumed, and computation is off "
    "by the planner's error on published runs."
)


def grid_picture(grid: PlanGrid) -> Picture:
    """Draw the gain of the first format with the job's batch, over the networks and by replicas on a node."""
    _, _, batch, form = grid.start
    found = {
        (cell.network, cell.replicas): cell.gain
        for cell in grid.cells
        if (cell.batch, cell.format) == (batch, form) and cell.gain
    }
    networks, paying = list(grid.networks), {network for (network, _), gain in found.items() if gain.most > 0}
    last = max((place for place, name in enumerate(networks) if name in paying), default=0)
    shown, zeros = networks[: last + 1], [grid.networks[name] for name in networks[last + 1 :]]
    figure, ((axes,),) = panels(1, 1, 8.4, 3.6)
    said = []
    for x, network in enumerate(shown):
        for place, count in enumerate(grid.replicas):
            if gain := found.get((network, count)):
                at, shade = x + 0.19 * (place - 0.5 * (len(grid.replicas) - 1)), SHADES[min(place, len(SHADES) - 1)]
                axes.plot([at] * 2, [100 * gain.least, 100 * gain.most], color=shade, lw=5, alpha=0.45,
                          solid_capstyle="butt")  # fmt: skip
                axes.plot(at, 100 * gain.planned, "o", color=shade, ms=5)
                if x == 0:
                    axes.annotate(f"{count}", (at, 100 * gain.most), (0, 4), textcoords="offset points", ha="center",
                                  fontsize="small", color=INK)  # fmt: skip
        gains = [100 * gain.planned for (net, _), gain in found.items() if net == network]
        said += [f"{grid.networks[network]}: {min(gains):.0f} to {max(gains):.0f} %"] if gains else []
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_xticks(range(len(shown)), [grid.networks[name] for name in shown])
    axes.set_xlabel("lines of a node, which all of its GPUs share" + (
        f"; nothing is saved on {', '.join(zeros)}" if zeros else ""
    ))  # fmt: skip
    axes.set_ylabel("% of vanilla's seconds saved")
    title = f"Seconds saved by {form}, planned: {grid.title}. Numbers: replicas on a node"
    tidy(axes, title)
    rest = [f"{', '.join(zeros)}: 0 %"] if zeros else []
    return Picture("planned gain", figure, f"{title}. {'; '.join([*said, *rest])}.")


def _html(path: Path, grids: Sequence[PlanGrid]) -> None:
    template = Path(__file__).with_name("grid.html").read_text(encoding="utf-8")
    # A script element ends at the first </, also inside a string.
    numbers = json.dumps([grid.lookup() for grid in grids], separators=(",", ":")).replace("</", "<\\/")
    title = "Does compression help?" if len(grids) > 1 else f"Does compression help? {grids[0].title}"
    write_whole(path, ReportDocument(title, LEAD, [Fragment(template.replace("NUMBERS", numbers))]).html())


def _csv(path: Path, grids: Sequence[PlanGrid]) -> None:
    tables = [grid.table() for grid in grids]
    replace(tables[0], rows=[row for table in tables for row in table.rows]).write_csv(path)


def _picture(path: Path, grids: Sequence[PlanGrid]) -> None:
    picture = grid_picture(grids[0])
    path.write_bytes(picture.files[path.suffix[1:]])


_WRITERS: dict[str, Callable[[Path, Sequence[PlanGrid]], None]] = {
    ".html": _html, ".csv": _csv, ".svg": _picture, ".png": _picture
}  # fmt: skip


def check_grid_file(path: Path) -> None:
    """Raise PlanError if no file of a grid has the suffix of `path`."""
    if path.suffix not in _WRITERS:
        raise PlanError(f"--output {path}: give a folder, or a file that ends in {', '.join(_WRITERS)}")


def write_grids(path: Path, grids: Sequence[PlanGrid]) -> None:
    """Write grids into a file of the kind that the suffix of `path` names; a picture shows the first one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _WRITERS[path.suffix](path, grids)
