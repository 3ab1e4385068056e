"""Options and functions of command lines that several experiments share."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.experiments.runs import claimed
from scripts.hosts.launch import RunFailed


def add_text_options(parser: argparse._ActionsContainer, max_mb: float) -> None:
    """Add --input and --max-mb, whose default is `max_mb`."""
    parser.add_argument(
        "--input", type=Path,
        help="a directory of text files, a .jsonl file, or a text file (default: this environment's Python packages)",
    )  # fmt: skip
    parser.add_argument(
        "--max-mb", type=float, default=max_mb, help="read this much of the text (default: %(default)g MB)"
    )


def add_run_options(parser: argparse._ActionsContainer, rows: Path, output: Path) -> None:
    """Add the options of a command that writes each finished run to a file, as one row."""
    add = parser.add_argument
    add("--show", action="store_true", help="show the finished runs, and train nothing")
    add("--retry", action="store_true", help="train failed runs again")
    add("--rows", type=Path, default=rows, metavar="CSV", help=f"file of the finished runs ({rows.name})")
    add("--output", type=Path, default=output, metavar="DIR", help="working folder (%(default)s)")
    add("--timeout", type=float, default=60.0, metavar="MINUTES", help="limit of one run (%(default)g)")
    add("--tiny", action="store_true", help=argparse.SUPPRESS)


def missing_made(options: argparse.Namespace, make: Callable[[], int]) -> int:
    """Call `make`, which makes the runs that the file lacks, and return its number of failed runs; 0 with --show.

    Raises:
        ExperimentError: another process writes to the working folder.
    """
    if options.show:
        return 0
    for folder in (options.output, options.rows.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with claimed(options.output):
        return make()


def words_and_further(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line at `--`; return the words before it, and those after it."""
    cut = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), list(argv[cut + 1 :])


def told(failure: RunFailed) -> int:
    """Print why a run failed and the end of its log; return the exit status."""
    print(*(f"  | {line}" for line in failure.tail), sep="\n", file=sys.stderr)
    print(f"error: {failure}\nthe whole log: {failure.log}", file=sys.stderr)
    return 1
