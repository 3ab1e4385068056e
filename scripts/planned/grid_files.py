"""Files of a grid of plans: a page on which a reader chooses a point, CSV, and a picture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from optimus_cc_ext.tools.data.output import write_whole
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.report.document import Fragment, ReportDocument
from optimus_cc_ext.tools.report.pictures import INK, PALETTE, panels, tidy
from scripts.planned.grid import PlanGrid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_grid_file", "grid_picture", "write_grid"]

LEAD = (
    "Planned, not measured: no training on several GPUs has been run yet. Computation and links were compared with "
    "published runs. What compression costs is assumed from the bytes that it moves, so every gain has a band: lines "
    "at 3/4 to 4/3 of their rate, compression at half to twice its assumed cost, computation off by the error on "
    "published runs."
)


def grid_picture(grid: PlanGrid) -> "Figure":
    """Draw the gain of the first format with the job's batch, over the networks and by replicas on a node."""
    _, _, batch, form = grid.start
    figure, ((axes,),) = panels(1, 1, 8.4, 3.9)
    for place, count in enumerate(grid.replicas):
        shade, aside = PALETTE[place], 0.17 * (place - 0.5 * (len(grid.replicas) - 1))
        found = {cell.network: cell for cell in grid.cells
                 if (cell.replicas, cell.batch, cell.format) == (count, batch, form)}  # fmt: skip
        label = f"{count} replica{'s' if count > 1 else ''} on a node"
        for x, network in enumerate(grid.networks):
            if gain := found[network].gain:
                axes.plot([x + aside] * 2, [100 * gain.least, 100 * gain.most], color=shade, lw=4, alpha=0.4,
                          solid_capstyle="butt")  # fmt: skip
                axes.plot(x + aside, 100 * gain.planned, "o", color=shade, ms=5, label=label)
                label = "_again"  # matplotlib leaves labels that begin with _ out of the legend
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_xticks(range(len(grid.networks)), list(grid.networks.values()))
    axes.set_xlabel("lines of a node, which all of its GPUs share")
    axes.set_ylabel("% of vanilla's seconds saved")
    axes.legend(frameon=False, fontsize="small")
    tidy(axes, f"Planned gain of {form}: {grid.title}, batch {batch:,}")
    return figure


def _html(path: Path, grid: PlanGrid) -> None:
    template = Path(__file__).with_name("grid.html").read_text(encoding="utf-8")
    # A script element ends at the first </, also inside a string.
    numbers = json.dumps(grid.lookup(), separators=(",", ":")).replace("</", "<\\/")
    write_whole(path, ReportDocument(f"Does compression help? {grid.title}", LEAD, [
        Fragment(template.replace("NUMBERS", numbers))
    ]).html())  # fmt: skip


def _picture(path: Path, grid: PlanGrid) -> None:
    from matplotlib import rc_context

    # Without date and random names, the same grid gives the same file.
    with rc_context({"svg.hashsalt": "optimus-cc"}):
        grid_picture(grid).savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


_WRITERS: dict[str, Callable[[Path, PlanGrid], None]] = {
    ".html": _html,
    ".csv": lambda path, grid: grid.table().write_csv(path),
    ".svg": _picture,
    ".png": _picture,
}


def check_grid_file(path: Path) -> None:
    """Raise PlanError if no file of a grid has the suffix of `path`."""
    if path.suffix not in _WRITERS:
        raise PlanError(f"--output {path}: give a folder, or a file that ends in {', '.join(_WRITERS)}")


def write_grid(path: Path, grid: PlanGrid) -> None:
    """Write the grid into a file of the kind that the suffix of `path` names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _WRITERS[path.suffix](path, grid)
