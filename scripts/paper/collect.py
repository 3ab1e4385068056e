"""Turn the folders of logs that scripts/paper's experiments wrote into the paper's tables and figures.

    python -m scripts.paper.collect [--scale paper|tiny] [--results FOLDER] [--output FOLDER]

Every experiment with logs gets CSV, pictures, and a section of index.html and report.md. Experiments that have not been
run are left out, and named.
"""

import argparse
import sys
from pathlib import Path

from optimus_cc_ext.errors import OptimusError, run_command

EXPERIMENTS = ("table2", "figure10", "figure11-summary", "figure12", "figure14")
TITLES = {"paper": "The paper's experiments", "tiny": "The paper's experiments at tiny scale"}
LEADS = {
    "paper": "",
    "tiny": "Tiny models, few iterations: this shows that everything runs from launch to plot. Of the paper's claims it"
    " shows only the traffic.",
}


def collect(results: Path, output: Path, scale: str = "tiny") -> list[str]:
    """Write everything that `results` has the logs for into `output`; return the names of the experiments found."""
    # The plots are imported here, because matplotlib takes a second, for which --help need not wait.
    from optimus_cc_ext.tools.report.document import Box, Picture, ReportDocument
    from scripts.paper import plots, tables

    table2, figure10, figure11, figure12 = (
        tables.read_runs(results, name) for name in ("table2", "figure10", "figure11", "figure12")
    )
    statistics, summary = tables.figure11(figure11)
    throughput = tables.figure14(results / "figure14" / "throughput.csv")
    run, compressor = ("model", "variant"), ("model", "compressor")
    # Each row has a drawing function, the table of the picture, the table that is shown, if that is a different one,
    # the columns that tell the lines or bars of the picture apart, and the columns that these show.
    figures = [
        (plots.learning_curves, tables.learning_curves(table2), tables.table2(table2), run, plots.LEARNING),
        (plots.breakdown, tables.figure10(figure10), None, run, plots.BREAKDOWN),
        (plots.error_statistics, statistics, summary, ("model", "stage"), plots.STATISTICS),
        (plots.memory, tables.figure12(figure12), None, run, plots.MEMORY),
        (plots.throughput, throughput, None, compressor, plots.THROUGHPUT),
    ]
    found = [(draw, data, shown or data, words) for draw, data, shown, *words in figures if (shown or data).rows]
    parts = []
    for draw, data, shown, (by, columns) in found:
        # Runs that never validated have a table, and nothing to draw.
        drawn = [Picture(data.name, draw(data), data.in_words(by, columns))] if data.rows else []
        parts.append(Box("", [shown, *drawn]))
    files = [data for _, data, *_ in found if data.rows]
    ReportDocument(TITLES[scale], LEADS[scale], parts, files=files).write(
        output, page="index.html", markdown="report.md"
    )
    return [shown.name for _, _, shown, _ in found]


def main() -> int:
    """Run the command line; the exit status is 2 if there is nothing to collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=tuple(TITLES), default="paper", help="scale of the results")
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
