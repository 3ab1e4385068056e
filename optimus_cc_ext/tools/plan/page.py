"""Files of a plan or a sweep: CSV, JSON, one page with pictures, and a Perfetto trace."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import DP_GRADIENTS
from optimus_cc_ext.forecast.timeline import last_backward_ends
from optimus_cc_ext.techniques.schedule import Pass
from optimus_cc_ext.tools.plan.iteration import CLASSES, PlannedIteration, breakdown, schedule_of
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.variants import Variant
from optimus_cc_ext.tools.report.document import Box, Folded, Number, Part, Picture, Points, ReportDocument
from optimus_cc_ext.tools.report.pictures import INK, PALETTE, colour, panels, tidy
from optimus_cc_ext.tools.report.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["trace", "write_plan", "write_sweep"]

_LEAD = (
    "Predicted, not measured. Computation and links were compared with published runs. No public run tests the costs "
    "and gains of compression, so every gain has a band."
)


def write_plan(
    folder: Path, job: Job, found: Sequence[Variant], chosen: Variant, tables: Sequence[Table], lines: Sequence[str]
) -> None:
    """Write index.html, plan.csv, plan.json and the pictures, and trace_vanilla.json and trace_best.json for
    ui.perfetto.dev.
    """
    plain, best, pays = found[0].result.seconds, chosen.gain, chosen.name != "vanilla"
    numbers = [
        Number("vanilla", f"{plain:.3f} s", "per iteration"),
        Number("best", f"{chosen.result.seconds:.3f} s" if pays else "-", chosen.name if pays else "nothing pays"),
        Number("gain", f"{100 * best.planned:.1f} %", f"{100 * best.least:.1f} to {100 * best.most:.1f} %"),
    ]
    pictures = [Picture("gains", _gains(found)), Picture("breakdown", _breakdowns(job, found))]
    said = Box("The answer", [Points.of([line for line in lines if not line.startswith(" ")])])
    constants = Folded("Constants, with their sources", {"plan": "\n".join(line for line in lines if line[:1] == " ")})
    parts: list[Part] = [Box("", numbers, "grid"), said, Box("", pictures, "grid wide"), *tables, constants]
    ReportDocument("A plan", _LEAD, parts).write(folder, page="index.html")
    content = {table.title: table.records() for table in tables}
    (folder / "plan.json").write_text(json.dumps({"lines": list(lines), **content}, indent=1) + "\n")
    for name, variant in (("vanilla", found[0]), ("best", chosen)):
        (folder / f"trace_{name}.json").write_text(json.dumps(trace(job, variant.config, variant.result)))


def write_sweep(folder: Path, table: Table, names: Sequence[str]) -> None:
    """Write index.html, sweep.csv, sweep.json and a picture of the gains of the fastest layout over the
    number of GPUs.
    """
    figure, ((*axes,),) = panels(1, len(table.distinct("link")), 4.6, 3.6, sharey=True)
    for ax, link in zip(axes, table.distinct("link"), strict=True):
        here = table.where(link=link)
        line = Table(table.columns, [here.where(nodes=nodes).rows[0] for nodes in here.distinct("nodes")])
        for place, name in enumerate(names):
            gains, shade = line.numbers(f"{name}: gain %"), colour(name, place)
            ax.plot(line.numbers("GPUs"), gains, marker="o", ms=3.5, lw=1.6, color=shade, label=name)
        ax.set_xscale("log", base=2)
        ax.axhline(0, color=INK, lw=0.8)
        ax.set_xlabel("GPUs")
        tidy(ax, str(link), "both")
    axes[0].set_ylabel("% of vanilla's time saved")
    axes[0].legend(frameon=False, fontsize="small")
    ReportDocument("A sweep", _LEAD, [Picture("gains", figure), table]).write(folder, page="index.html")
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
            color=(*PALETTE, "#b6bec8")[place % (len(PALETTE) + 1)],
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(found)), [v.name for v in found])
    axes.invert_yaxis()
    axes.set_xlabel("seconds that nothing hides")
    axes.legend(frameon=False, fontsize="x-small", ncols=5, loc="upper center", bbox_to_anchor=(0.45, -0.12))
    tidy(axes, "Where the seconds go", "x")
    return figure


_THREADS = ("computation", "messages", "reductions")
MOST_PASSES = 100_000
"""Largest number of passes in a trace. A longer iteration is drawn with fewer micro-batches, so that Perfetto can load
it.
"""


def trace(job: Job, config: OptimusConfig, result: PlannedIteration) -> dict[str, Any]:
    """Return the trace of `result`, the iteration of `job` under `config`; if it is very long, some micro-batches are
    left out.

    The format is Chrome's trace event format (JSON, complete events "X" in microseconds). Each stage is a process; its
    threads are computation, messages and reductions.
    """
    events: list[dict[str, Any]] = []
    names = ["optimizer and gather", *(f"stage {stage}" for stage in range(job.pp))]
    for process, name in enumerate(names):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        for thread, task in enumerate(_THREADS):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": task}})

    def add(process: int, thread: int, name: str, begin: float, seconds: float) -> None:
        if seconds > 0:
            place = {"pid": process, "tid": thread, "cat": _THREADS[thread]}
            events.append({"ph": "X", "name": name, "ts": 1e6 * begin, "dur": 1e6 * seconds, **place})

    def observe(stage: int, work: Pass | None, begin: float, end: float) -> None:
        if work is None:
            add(stage + 1, 1, "message", begin, end - begin)
        else:
            way = "forward" if work.forward else "backward"
            chunk = f", chunk {work.chunk}" if job.vpp > 1 else ""
            add(stage + 1, 0, f"{way} {work.micro_batch}{chunk}", begin, end - begin)

    rounds = max(4, MOST_PASSES // (2 * job.pp * job.vpp * job.pp))
    count = min(job.micro_batches, job.pp * rounds)
    times = result.times
    ends = last_backward_ends(schedule_of(job.pp, job.vpp, count), times.costs, observe)
    reduced = [end + left for end, left in zip(ends, times.reductions, strict=True)]
    for stage, (end, left) in enumerate(zip(ends, times.reductions, strict=True)):
        form = config.format_of(DP_GRADIENTS) if stage in result.compressed_stages else "dense"
        add(stage + 1, 2, f"gradients, {form}", end, left)
    for stage in {0, job.pp - 1}:
        add(stage + 1, 2, "embedding", max(reduced[0], reduced[-1]), times.embedding)
    over = max(*reduced, max(reduced[0], reduced[-1]) + times.embedding)
    add(0, 0, "optimizer", over, result.step)
    add(0, 2, "parameter gather", over + result.step, times.after_step)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
