"""Command line of the quickstart: one small GPT trained twice on real text, vanilla and compressed, side by side."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from optimus_cc_ext.errors import OptimusError
from scripts.experiments.command import add_text_options, words_and_further

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quickstart",
        description="Train a small GPT with Megatron on four hosts with slow links, made of this machine, once vanilla "
        "and once compressed, and compare. Where hosts cannot be made, all ranks share the machine, and the gain is "
        "planned.",
        epilog="Flags after -- are added to the compressed run, such as: -- --compressed-backprop-messages all",
    )
    add_text_options(parser, max_mb=10.0)
    parser.add_argument(
        "--pattern", help="names of the files to read in a directory (default: *.py, with --input *.txt)"
    )
    parser.add_argument("--iterations", type=int, metavar="N", help="iterations of each run (default: 80)")
    parser.add_argument(
        "--rate",
        metavar="RATE",
        help="rate of the links between the hosts, such as 50mbit; none: no hosts (default: 100mbit)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("results/quickstart"), metavar="DIR",
        help="folder of the results; beside it, DIR-data keeps the prepared text (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="MINUTES",
        help="limit for everything together (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    """Run the quickstart.

    Returns the exit status: 0; 1: a run failed, or its numbers contradict each other; 2: bad input; 128 + N: signal N
    ended it.
    """
    words, further = words_and_further(argv)
    options = _build_parser().parse_args(words)
    for signum in _SIGNALS:
        signal.signal(signum, _interrupt)
    try:
        # Both modules are imported here, because --help needs neither, and so that a missing package is reported like
        # any other error.
        from optimus_cc_ext.tools.report import require
        from scripts.quickstart.compare import compare

        require()
        return compare(options, further)
    except (OptimusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptimusError) else 1
    except SystemExit as ended:
        name = signal.Signals(ended.code - 128).name
        print(f"interrupted ({name}): all processes are ended, nothing unfinished is kept", file=sys.stderr)
        return ended.code


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    # Only the first signal counts: a second Ctrl-C must not interrupt the cleaning up.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
