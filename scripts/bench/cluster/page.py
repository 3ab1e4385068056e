"""Output of the runs: JSON with everything, and a page with tables and plots."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from optimus_cc_ext.tools.data.output import write_whole
from optimus_cc_ext.tools.report.document import Box, Picture, Points, ReportDocument, machine
from optimus_cc_ext.tools.report.pictures import INK, colour, panels, tidy
from optimus_cc_ext.tools.report.table import Table
from scripts.bench.cluster.model import PAPER, proportions
from scripts.bench.cluster.results import ALL, losses_agree, paired, times, traffic
from scripts.bench.cluster.run import Iteration, Run
from scripts.experiments.models import MODELS, ExperimentError, Layout
from scripts.experiments.variants import VANILLA
from scripts.hosts.network import UNSHAPED, bits_per_second

JSON_NAME, MARKDOWN_NAME = "cluster.json", "cluster.md"
_FORMAT = 5


def write(folder: Path, arguments: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Write JSON, tables and plots of the runs so far; return the tables as Markdown."""
    here, tables = machine(), {"times": times(runs), "paired": paired(runs), "traffic": traffic(runs)}
    content = {
        "format": _FORMAT, "machine": here, "models": {run.model: asdict(MODELS[run.model]) for run in runs},
        "arguments": arguments, "runs": [asdict(run) for run in runs],
        **{name: table.records() for name, table in tables.items()},
    }  # fmt: skip
    where = ", ".join(f"{name} {value}" for name, value in here.items())
    parts = []
    for model, layout in dict.fromkeys((run.model, run.layout) for run in runs):
        times_here, pairs_here, traffic_here = (table.where(model=model, layout=layout) for table in tables.values())
        sent = proportions(MODELS[model], Layout.parsed(layout))
        together = times_here.where(block=ALL)
        words = [together.in_words(["variant", "rate"], columns) for columns in (["seconds"], ["recovered", "bound"])]
        parts.append(Box(f"{model}, {layout}", [
            f"Traffic of a rank: {sent}.\nThe paper's 8.3B: {PAPER}.", times_here, pairs_here, traffic_here,
            Points.of(_remarks([run for run in runs if (run.model, run.layout) == (model, layout)])),
            Picture(f"time_{model}_{layout}", _draw_times(together), words[0]),
            Picture(f"recovered_{model}_{layout}", _draw_shares(times_here), words[1]),
        ]))  # fmt: skip
    document = ReportDocument("Training on shaped links", f"{where}. Arguments: `{json.dumps(arguments)}`.", parts)
    document.write(folder, markdown=MARKDOWN_NAME)
    write_whole(folder / JSON_NAME, json.dumps(content, indent=1) + "\n")
    return document.markdown()


def load(folder: Path) -> tuple[dict[str, Any], list[Run]]:
    """Read the files that `write` wrote; return the arguments and the runs.

    Raises:
        OSError: there is no such file.
        ExperimentError: another program wrote it, or its models have changed since.
    """
    path = folder / JSON_NAME
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ExperimentError(f"{path}: not written by this version of the script. Give another --output")
    for name, model in content["models"].items():
        if name not in MODELS or asdict(MODELS[name]) != model:
            raise ExperimentError(f"{path}: its model {name!r} is another one than today's. Give another --output")
    runs = []
    for saved in content["runs"]:
        for each in saved["iterations"]:
            each["traffic"] = {name: tuple(both) for name, both in each["traffic"].items()}
        runs.append(Run(**saved | {"iterations": [Iteration(**each) for each in saved["iterations"]]}))
    return content["arguments"], runs


def _remarks(runs: Sequence[Run]) -> list[str]:
    last = {run.variant: run for run in runs}.values()
    remarks = [
        f"{run.variant}: `{' '.join(run.flags) or 'no flags of ours'}`: {run.techniques or 'not logged'}."
        for run in last
    ]
    for run in runs:
        rates = ", ".join(dict.fromkeys(each.rate for each in run.iterations if each.measured))
        remarks += [f"{run.variant}, block {run.block}, {rates}: {line}." for line in run.trial]
    same = "equal" if losses_agree(runs) else "NOT equal"
    return [*remarks, f"Losses of the same variant in different blocks: {same} in every iteration."]


def _draw_times(table: Table) -> Figure:
    """Draw the seconds by rate, with unshaped links at the right end, after a gap."""
    figure, ((axes,),) = panels(1, 1, 7.6, 4.4)
    rates = sorted(map(str, table.distinct("rate")), key=bits_per_second)
    places = {rate: place + 0.4 * (rate == UNSHAPED) for place, rate in enumerate(rates)}
    for place, variant in enumerate(table.distinct("variant")):
        mine = table.where(variant=variant)
        x = [places[str(rate)] for rate in mine.column("rate")]
        y, lower, upper = (mine.numbers(name) for name in ("seconds", "lower quartile", "upper quartile"))
        axes.vlines(x, lower, upper, color=colour(variant, place), lw=4, alpha=0.4)
        axes.plot(x, y, color=colour(variant, place), marker="o", ms=5, lw=1.8, label=str(variant))
    axes.set_xticks([places[rate] for rate in rates], rates)
    axes.set(xlabel="rate of every link, both ways", ylim=(0, None))
    axes.legend(frameon=False)
    tidy(axes, "Seconds per iteration (median, quartiles)")
    return figure


def _draw_shares(table: Table) -> Figure:
    """Draw the recovered shares: bars for all blocks together, dots for each block."""
    figure, ((axes,),) = panels(1, 1, 7.6, 4.4)
    rates = sorted((rate for rate in map(str, table.distinct("rate")) if rate != UNSHAPED), key=bits_per_second)
    variants = [variant for variant in table.distinct("variant") if variant != VANILLA]
    width = 0.8 / max(len(variants), 1)
    for place, variant in enumerate(variants, start=1):
        for number, rate in enumerate(rates):
            mine = table.where(variant=variant, rate=rate)
            together = mine.where(block=ALL)
            x, label = [number + (place - 1) * width] * len(together.rows), "" if number else str(variant)
            axes.bar(x, together.numbers("recovered"), 0.9 * width, color=colour(variant, place), label=label)
            axes.errorbar(x, together.numbers("bound"), xerr=0.45 * width, fmt="none", color=INK, lw=2)
            single = mine.numbers("recovered")[len(together.rows) :]  # the row of all blocks together comes first
            axes.plot(x * len(single), single, "o", ms=3, color=INK, alpha=0.6)
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_xticks(range(len(rates)), rates)
    axes.set_xlabel("rate of every link, both ways; lines: bound, dots: single blocks")
    if variants and rates:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    tidy(axes, "Share of the exposed communication that is recovered")
    return figure
