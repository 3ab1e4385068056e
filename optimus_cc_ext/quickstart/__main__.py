"""`python -m optimus_cc_ext.quickstart`: the command line, and the order of things."""

import argparse
import dataclasses
import json
import logging
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.data import PreparedData, prepare
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.quickstart.display import Display, display
from optimus_cc_ext.quickstart.event_log import read_record
from optimus_cc_ext.quickstart.log_lines import parse_progress, parse_techniques
from optimus_cc_ext.quickstart.report import Outcome, Run, cross_check, render, summarize
from optimus_cc_ext.quickstart.runner import RunFailed, run_torchrun, torchrun_command
from optimus_cc_ext.quickstart.settings import RUNS, TINY, QuickstartError, Settings, check_flags, check_text, remarks
from optimus_cc_ext.quickstart.workspace import Workspace, claim

__all__ = ["main"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupted(BaseException):
    """A signal asked for the end. Like KeyboardInterrupt, no handler of ordinary errors may swallow it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quickstart",
        description="Train a small GPT with Megatron on this machine, once vanilla and once compressed, and compare.",
        epilog="What follows -- is added to the compressed run, such as: -- --compressed-backprop-messages all",
    )
    parser.add_argument(
        "--input", type=Path,
        help="a directory of text files, a .jsonl file, or a text file (default: this environment's Python packages)",
    )  # fmt: skip
    parser.add_argument("--pattern", help="names of the files to read in a directory (*.py, with --input *.txt)")
    parser.add_argument("--max-mb", type=float, default=10.0, help="take this much of the text (default: %(default)g)")
    parser.add_argument("--iterations", type=int, metavar="N", help=f"of each run (default: {Settings.iterations})")
    parser.add_argument(
        "--output", type=Path, default=Path("results/quickstart"), metavar="DIR",
        help="folder of the results; beside it, DIR-data keeps the prepared text (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="MINUTES",
        help="give up after so long, all together (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the quickstart.

    Returns the exit status: 0; 1: a run failed, or its numbers contradict each other; 2: bad input;
    128 + the signal's number where a signal ended it.
    """
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    options, further = _build_parser().parse_args(words[:cut]), words[cut + 1 :]
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    # On a machine with CUDA's tools and no GPU it says so where Megatron is imported; here that is the plan.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for signum in _SIGNALS:
        signal.signal(signum, _interrupt)
    try:
        return _quickstart(options, further, console)
    except RunFailed as error:
        for line in error.tail:
            errors.print(f"  | {line}", markup=False, style="dim")
        errors.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        errors.print(f"the whole log: {error.log}", markup=False, soft_wrap=True)
        return 1
    except OptimusError as error:
        errors.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 2
    except OSError as error:
        errors.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except _Interrupted as interruption:
        name = signal.Signals(interruption.signum).name
        errors.print(f"interrupted ({name}): all processes are ended, nothing unfinished is kept")
        return 128 + interruption.signum


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    # Once: a second Ctrl-C must not end the cleaning up.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise _Interrupted(signum)


def _quickstart(options: argparse.Namespace, further: list[str], console: Console) -> int:
    settings = _settings(options)
    config = check_flags(settings, further)
    deadline = time.monotonic() + 60 * options.timeout
    source = options.input or Path(sysconfig.get_path("purelib"))
    pattern = options.pattern or ("*.txt" if options.input else "*.py")
    text = str(options.input) if options.input else "the Python sources of this environment's packages"
    with claim(options.output, source) as workspace:
        try:
            started = time.monotonic()
            data = prepare(
                source, workspace.data, vocab_size=settings.vocabulary, pattern=pattern,
                max_mb=options.max_mb, progress=console.is_terminal,
            )  # fmt: skip
            check_text(settings, data)
            preparation = time.monotonic() - started
            _introduce(console, settings, config, data, text)
            with display(console, settings.iterations) as shown:
                runs = {
                    run: _train(run, settings.technique_flags(run, further), settings, data, workspace, shown, deadline)
                    for run in RUNS
                }
            outcome = Outcome(settings, tuple(remarks(settings, config)), text, data, preparation, runs)
            _write(outcome, workspace.unfinished)
            with _undisturbed():
                workspace.publish()
        except RunFailed:
            raise  # its log is what the user needs now; the next start clears it away
        except BaseException:
            workspace.discard()
            raise
    console.print("", render(outcome), "", sep="\n")
    console.print(f"{outcome.seconds / 60:.1f} minutes. Look at {workspace.output / 'index.html'}", soft_wrap=True)
    return 1 if cross_check(outcome.vanilla, outcome.compressed) else 0


def _settings(options: argparse.Namespace) -> Settings:
    settings = TINY if options.tiny else Settings()
    iterations = settings.iterations if options.iterations is None else options.iterations
    if iterations < 2:
        raise QuickstartError(f"--iterations {iterations}: there is no curve to see. Give 2 or more")
    if not options.timeout > 0:
        raise QuickstartError(f"--timeout {options.timeout:g}: no time at all. Give a positive number of minutes")
    return dataclasses.replace(settings, iterations=iterations)


def _introduce(
    console: Console, settings: Settings, config: OptimusConfig, data: PreparedData, text: str
) -> None:  # fmt: skip
    state = "kept from an earlier run" if data.up_to_date else "prepared"
    grid = Table.grid(padding=(0, 1))
    grid.add_row("text", f"{escape(text)}: {data.text_bytes / 1e6:.1f} MB, {data.tokens:,} tokens ({state})")
    grid.add_row(
        "model",
        f"GPT with {settings.parameters / 1e6:.1f} million parameters: {settings.layers} layers, hidden"
        f" {settings.hidden}, sequence {settings.sequence}, vocabulary {data.vocab_size:,} (tied)",
    )
    grid.add_row(
        "layout",
        f"{settings.stages} pipeline stages x {settings.replicas} data-parallel replicas = {settings.processes}"
        f" processes; {settings.micro_batches} micro-batches of {settings.micro_batch} sequences per replica",
    )
    for remark in remarks(settings, config):
        grid.add_row("note", remark)
    console.print(grid, "", sep="\n")


def _train(
    run: str, techniques: list[str], settings: Settings, data: PreparedData, workspace: Workspace,
    shown: Display, deadline: float,
) -> Run:  # fmt: skip
    folder = workspace.run_folder(run)
    said = ["not said"]

    def follow(line: str) -> None:
        if progress := parse_progress(line):
            shown.advance(run, progress)
        elif found := parse_techniques(line):
            said[0] = found

    flags = settings.megatron_flags(data, folder / "tensorboard") + techniques
    shown.start(run)
    seconds = run_torchrun(settings.processes, flags, folder, follow, deadline)
    # What a person repeats must not write into the folder of a run that is over.
    command = torchrun_command(settings.processes, settings.megatron_flags(data, Path("tensorboard")) + techniques)
    return Run(read_record(folder / "tensorboard"), command, said[0], seconds)


def _write(outcome: Outcome, folder: Path) -> None:
    # Here, not above: matplotlib takes a second, which --help and bad input need not wait for.
    from optimus_cc_ext.quickstart.page import build_page
    from optimus_cc_ext.quickstart.pictures import draw, save_png, svg_data_uri

    figures = draw(outcome)
    for name, figure in figures.items():
        save_png(figure, folder / f"{name}.png")
    page = build_page(outcome, {name: svg_data_uri(figure) for name, figure in figures.items()})
    (folder / "index.html").write_text(page, encoding="utf-8")
    summary = json.dumps(summarize(outcome), indent=1)
    (folder / "summary.json").write_text(summary + "\n", encoding="utf-8")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait: half way, neither the old results nor the new ones are in place."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


if __name__ == "__main__":
    sys.exit(main())
