"""Turn the folders of logs that scripts/paper's experiments wrote into the paper's tables and figures.

    scripts/paper/collect.py [--scale paper|tiny] [--results FOLDER] [--output FOLDER]

For every experiment that has logs: CSV, PNG, and a section of report.md. What has not been run is left out, and said.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import tables
from run_logs import read_runs
from tables import Table

ROOT = Path(__file__).resolve().parents[2]
WORKSPACE = ROOT if (ROOT / "setup.py").is_file() else Path.cwd()  # nothing is written into an installed package


HEADINGS = {
    "paper": "# The paper's experiments",
    "tiny": "# The paper's experiments at tiny scale\n\nTiny models, few iterations, one machine, no network between"
    " ranks: this shows that everything runs from launch to plot. Of the paper's claims it shows only the traffic.",
}


def collect(results: Path, output: Path, heading: str) -> list[str]:
    """Write everything that `results` has the logs for into `output`; return the names of the experiments found."""
    import plots  # here: matplotlib takes a second, which --help need not wait for

    output.mkdir(parents=True, exist_ok=True)
    sections = [heading + "\n"]
    found: list[str] = []

    def add(name: str, picture: str, data: Table, shown: Table, draw: Callable[[Table, Path], None]) -> None:
        """`data` goes into the picture and, if it is not `shown` itself, into a CSV of the picture's name."""
        found.append(name)
        shown.write_csv(output / f"{name}.csv")
        if data is not shown:
            data.write_csv(output / f"{picture}.csv")
        draw(data, output / f"{picture}.png")
        sections.append(f"{shown.markdown()}\n![{picture}]({picture}.png)\n")

    if runs := read_runs(results, "table2"):
        add("table2", "figure9", tables.learning_curves(runs), tables.table2(runs), plots.draw_learning_curves)
    if runs := read_runs(results, "figure10"):
        table = tables.figure10(runs)
        add("figure10", "figure10", table, table, plots.draw_breakdown)
    if runs := [run for run in read_runs(results, "figure11") if run.statistics]:
        data, summary = tables.figure11(runs)
        add("figure11-summary", "figure11", data, summary, plots.draw_error_statistics)
    if runs := read_runs(results, "figure12"):
        table = tables.figure12(runs)
        add("figure12", "figure12", table, table, plots.draw_memory)
    if table14 := tables.figure14(results / "figure14" / "throughput.csv"):
        add("figure14", "figure14", table14, table14, plots.draw_throughput)
    (output / "report.md").write_text("\n".join(sections), encoding="utf-8")
    return found


def main() -> int:
    """The command line; the exit status is 2 where there is nothing to collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("paper", "tiny"), default="paper", help="whose results")
    parser.add_argument("--results", type=Path, help="folder of all results (results/paper, or results/paper-tiny)")
    parser.add_argument("--output", type=Path, help="where to write (the folder 'report' in that of the results)")
    options = parser.parse_args()
    results = options.results or WORKSPACE / "results" / ("paper" if options.scale == "paper" else "paper-tiny")
    if not results.is_dir():
        print(f"collect.py: error: {results}: no such folder. Run an experiment, or give --results", file=sys.stderr)
        return 2
    output = options.output or results / "report"
    found = collect(results, output, HEADINGS[options.scale])
    if not found:
        print(f"collect.py: error: {results}: no log with an iteration in it. Run an experiment first", file=sys.stderr)
        return 2
    missing = [name for name in ("table2", "figure10", "figure11-summary", "figure12", "figure14") if name not in found]
    if missing:
        print(f"not run, left out: {', '.join(missing)}")
    print(f"written: {output / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
