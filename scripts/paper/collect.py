"""Turn the folders of logs that scripts/paper's experiments wrote into the paper's tables and figures.

    python -m scripts.paper.collect [--scale paper|tiny] [--results FOLDER] [--output FOLDER]

For every experiment that has logs: CSV, PNG, SVG, and a section of index.html and report.md. What has not been run is
left out, and said.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimus_cc_ext.errors import OptimusError, run_command

EXPERIMENTS = ("table2", "figure10", "figure11-summary", "figure12", "figure14")
TITLES = {"paper": "The paper's experiments", "tiny": "The paper's experiments at tiny scale"}
LEADS = {
    "paper": "",
    "tiny": "Tiny models, few iterations, one machine, no network between ranks: this shows that everything runs from"
    " launch to plot. Of the paper's claims it shows only the traffic.",
}


def collect(results: Path, output: Path, scale: str = "tiny") -> list[str]:
    """Write everything that `results` has the logs for into `output`; return the names of the experiments found."""
    # Here: matplotlib takes a second, which --help need not wait for.
    from optimus_cc_ext.report import page, pictures
    from scripts.paper import plots, tables

    output.mkdir(parents=True, exist_ok=True)
    markdown, blocks = [f"# {TITLES[scale]}\n\n{LEADS[scale]}\n"], []
    found: list[str] = []

    def add(name: str, picture: str, data: tables.Table, shown: tables.Table, draw: Callable[..., Any]) -> None:
        """`data` goes into the picture and, if it is not `shown` itself, into a CSV of the picture's name."""
        found.append(name)
        shown.write_csv(output / f"{name}.csv")
        if data is not shown:
            data.write_csv(output / f"{picture}.csv")
        pictures.save(draw(data), output, picture)
        markdown.append(f"{shown.markdown()}\n![{picture}]({picture}.png)\n")
        blocks.append(page.card(shown.title, shown.html(), page.picture(output / f"{picture}.svg")))

    if runs := tables.read_runs(results, "table2"):
        add("table2", "figure9", tables.learning_curves(runs), tables.table2(runs), plots.learning_curves)
    if runs := tables.read_runs(results, "figure10"):
        table = tables.figure10(runs)
        add("figure10", "figure10", table, table, plots.breakdown)
    data, summary = tables.figure11(tables.read_runs(results, "figure11"))
    if data.rows:
        add("figure11-summary", "figure11", data, summary, plots.error_statistics)
    if runs := tables.read_runs(results, "figure12"):
        table = tables.figure12(runs)
        add("figure12", "figure12", table, table, plots.memory)
    if table14 := tables.figure14(results / "figure14" / "throughput.csv"):
        add("figure14", "figure14", table14, table14, plots.throughput)
    (output / "report.md").write_text("\n".join(markdown), encoding="utf-8")
    (output / "index.html").write_text(page.document(TITLES[scale], LEADS[scale], *blocks), encoding="utf-8")
    return found


def main() -> int:
    """The command line; the exit status is 2 where there is nothing to collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=tuple(TITLES), default="paper", help="whose results")
    parser.add_argument("--results", type=Path, help="folder of all results (results/paper, or results/paper-tiny)")
    parser.add_argument("--output", type=Path, help="where to write (the folder 'report' in that of the results)")
    options = parser.parse_args()
    return run_command(lambda: _collect(options))


def _collect(options: argparse.Namespace) -> None:
    results = options.results or Path("results", "paper" if options.scale == "paper" else "paper-tiny")
    output = options.output or results / "report"
    if not results.is_dir():
        raise OptimusError(f"{results}: no such folder. Run an experiment, or give --results")
    found = collect(results, output, options.scale)
    if not found:
        raise OptimusError(f"{results}: no log with an iteration in it. Run an experiment first")
    if missing := [name for name in EXPERIMENTS if name not in found]:
        print(f"not run, left out: {', '.join(missing)}")
    print(f"written: {output / 'index.html'}, {output / 'report.md'}")


if __name__ == "__main__":
    sys.exit(main())
