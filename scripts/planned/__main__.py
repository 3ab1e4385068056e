"""Pages and pictures of a plan, a sweep or a grid of plans.

    python -m scripts.planned --output PATH <arguments of optimus-cc plan>

A folder gets index.html, CSV, JSON and pictures of the plan, or of the sweep of --sweep. A file gets a grid of plans,
over networks, replicas on a node, batches and formats: FILE.html is a page on which one is chosen, FILE.csv the table,
FILE.svg and FILE.png a picture.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.command import add_arguments, asked_of, plan_of, swept
from optimus_cc_ext.tools.plan.tables import constants
from optimus_cc_ext.tools.report import require
from scripts.planned.grid import Question, planned_grid, without


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; return 0, or 2 after bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.planned", description=__doc__, conflict_handler="resolve",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="folder or file to write")
    parser.add_argument(
        "--beside", action="append", default=[], metavar="WORDS",
        help="one more job on the page of a grid: the words that differ, such as '--nodes 16 --model llama3-70b -- "
        "--tensor-model-parallel-size 8'",
    )  # fmt: skip
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    return run_command(lambda: _write(parser, words, options))


def _write(parser: argparse.ArgumentParser, words: list[str], options: argparse.Namespace) -> None:
    require()
    from scripts.planned.page import write_plan, write_sweep  # imports matplotlib, which `require` asks for

    if options.output.suffix:
        jobs = [options, *(parser.parse_args(_merged(words, shlex.split(each))) for each in options.beside)]
        _grids(options.output, jobs)
    elif options.sweep:
        write_sweep(options.output, *swept(options))
    else:
        asked = asked_of(options)
        answer = plan_of(asked)
        lines = [*answer.lines, *constants(asked.cluster)]
        write_plan(options.output, asked.job, answer.found, answer.chosen, answer.tables, lines)


def _merged(words: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return a command line with the words of another one, whose flags win, on both sides of `--`."""
    (here, megatron), (ours, further) = (_halves(each) for each in (words, other))
    changed = [word for word in further if word.startswith("--")]
    return [*here, *ours, "--", *without(megatron, changed), *further]


def _halves(words: Sequence[str]) -> tuple[list[str], list[str]]:
    place = [*words, "--"].index("--")
    return list(words[:place]), list(words[place + 1 :])


def _grids(path: Path, jobs: Sequence[argparse.Namespace]) -> None:
    from rich.progress import Progress

    from scripts.planned.grid_files import check_grid_file, write_grids

    check_grid_file(path)
    grids = []
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bars:
        for options in jobs:
            task = bars.add_task("points")
            grids.append(
                planned_grid(_question(options), lambda n, count, t=task: bars.update(t, completed=n, total=count))
            )
    write_grids(path, grids)
    print(f"wrote {path}: {sum(len(grid.cells) for grid in grids)} plans")


def _question(options: argparse.Namespace) -> Question:
    if options.run:
        raise PlanError(f"--output {options.output}: a grid is planned from Megatron's flags. Leave out --from")
    asked = asked_of(options)
    given = ("cluster", "nodes", "gpus_per_node", "nccl_tests", "model")
    pairs = [(f"--{name.replace('_', '-')}", getattr(options, name)) for name in given]
    typed = [str(word) for pair in pairs if pair[1] is not None for word in pair]
    return Question(typed, asked.cluster, asked.job.gpus, options.model, asked.megatron, asked.own)


if __name__ == "__main__":
    sys.exit(main())
