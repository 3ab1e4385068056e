"""Pages and pictures of a plan, a sweep or a grid of plans.

    python -m scripts.planned --output PATH <arguments of optimus-cc plan>

A folder gets index.html, CSV, JSON and pictures of the plan, or of the sweep of --sweep. A file gets a grid of plans,
over networks, replicas on a node, batches and formats: FILE.html is a page on which one is chosen, FILE.csv the table,
FILE.svg and FILE.png a picture.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.command import add_arguments, asked_of, plan_of, swept
from optimus_cc_ext.tools.plan.tables import constants
from optimus_cc_ext.tools.report import require
from scripts.planned.grid import Question, planned_grid


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; return 0, or 2 after bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.planned", description=__doc__, conflict_handler="resolve",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="folder or file to write")
    options = parser.parse_args(argv)
    return run_command(lambda: _write(options))


def _write(options: argparse.Namespace) -> None:
    require()
    from scripts.planned.page import write_plan, write_sweep  # imports matplotlib, which `require` asks for

    if options.output.suffix:
        _grid(options)
    elif options.sweep:
        write_sweep(options.output, *swept(options))
    else:
        asked = asked_of(options)
        answer = plan_of(asked)
        lines = [*answer.lines, *constants(asked.cluster)]
        write_plan(options.output, asked.job, answer.found, answer.chosen, answer.tables, lines)


def _grid(options: argparse.Namespace) -> None:
    from rich.progress import Progress

    from scripts.planned.grid_files import check_grid_file, write_grid

    check_grid_file(options.output)
    if options.run:
        raise PlanError(f"--output {options.output}: a grid is planned from Megatron's flags. Leave out --from")
    asked = asked_of(options)
    given = ("cluster", "nodes", "gpus_per_node", "nccl_tests", "model")
    words = [(f"--{name.replace('_', '-')}", getattr(options, name)) for name in given]
    typed = [str(word) for pair in words if pair[1] is not None for word in pair]
    question = Question(typed, asked.cluster, asked.job.gpus, options.model, asked.megatron, asked.own)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("points")
        grid = planned_grid(question, lambda done, count: bars.update(task, completed=done, total=count))
    write_grid(options.output, grid)
    print(f"wrote {options.output}: {len(grid.cells)} plans")


if __name__ == "__main__":
    sys.exit(main())
