"""The order of things: check, prepare the text, train twice, write the results, show them."""

import argparse
import dataclasses
import logging
import sys
import sysconfig
import time
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.panel import Panel

from optimus_cc_ext.data import PreparedData, prepare
from optimus_cc_ext.report.comparison import REQUIRED
from optimus_cc_ext.report.log_lines import parse_progress, parse_techniques
from optimus_cc_ext.report.record import read_events
from scripts.quickstart.display import Display
from scripts.quickstart.outcome import Outcome, Run, time_remark
from scripts.quickstart.runner import RunFailed, run_torchrun, torchrun_command
from scripts.quickstart.settings import RUNS, TINY, QuickstartError, Settings, check_flags, check_text, remarks
from scripts.quickstart.workspace import Workspace, claim

__all__ = ["compare", "show"]


def compare(options: argparse.Namespace, further: list[str]) -> int:
    """Do what `options` ask for, `further` being flags of the compressed run; return the exit status."""
    # On a machine with CUDA's tools and no GPU it says so where Megatron is imported; here that is the plan.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    settings = _settings(options)
    config = check_flags(settings, further)
    deadline = time.monotonic() + 60 * options.timeout
    source = options.input or Path(sysconfig.get_path("purelib"))
    text = str(options.input) if options.input else "the Python sources of this environment's packages"
    console = Console(highlight=False)
    with claim(options.output, source) as workspace:
        try:
            started = time.monotonic()
            data = prepare(
                source, workspace.data, vocab_size=settings.vocabulary, max_mb=options.max_mb,
                pattern=options.pattern or ("*.txt" if options.input else "*.py"), progress=console.is_terminal,
            )  # fmt: skip
            check_text(settings, data)
            preparation = time.monotonic() - started
            said = remarks(settings, config)
            _introduce(console, settings, data, text, said)
            with Display(console, settings.iterations) as display:
                runs = {
                    run: _train(
                        run, workspace, settings, data, settings.technique_flags(run, further), display, deadline
                    )
                    for run in RUNS
                }
            outcome = Outcome(settings, tuple(said), text, data, preparation, runs)
            outcome.write(workspace.unfinished)
            workspace.publish()
        except RunFailed as failure:
            # Its log stays, which is what the user needs now; the next start clears it away.
            print(*(f"  | {line}" for line in failure.tail), sep="\n", file=sys.stderr)
            print(f"error: {failure}\nthe whole log: {failure.log}", file=sys.stderr)
            return 1
        except BaseException:
            workspace.discard()
            raise
    show(console, outcome)
    console.print(f"{outcome.seconds / 60:.1f} minutes. Look at {workspace.output / 'index.html'}", soft_wrap=True)
    return 1 if outcome.comparison.complaints() else 0


def _settings(options: argparse.Namespace) -> Settings:
    settings = TINY if options.tiny else Settings()
    iterations = settings.iterations if options.iterations is None else options.iterations
    if iterations < 2:
        raise QuickstartError(f"--iterations {iterations}: there is no curve to see. Give 2 or more")
    if not options.timeout > 0:
        raise QuickstartError(f"--timeout {options.timeout:g}: no time at all. Give a positive number of minutes")
    return dataclasses.replace(settings, iterations=iterations)


def _introduce(console: Console, settings: Settings, data: PreparedData, text: str, said: list[str]) -> None:
    state = "kept from an earlier run" if data.up_to_date else "prepared"
    console.print(
        f"text: {text}: {data.text_bytes / 1e6:.1f} MB, {data.tokens:,} tokens ({state})",
        f"model: GPT with {settings.parameters / 1e6:.1f} million parameters: {settings.model}",
        f"layout: {settings.layout}", *(f"note: {remark}" for remark in said), "", sep="\n", markup=False,
    )  # fmt: skip


def _train(
    run: str, workspace: Workspace, settings: Settings, data: PreparedData, techniques: list[str],
    display: Display, deadline: float,
) -> Run:  # fmt: skip
    folder = workspace.run_folder(run)
    said = ["not said"]

    def follow(line: str) -> None:
        if progress := parse_progress(line):
            display.advance(run, progress)
        elif found := parse_techniques(line):
            said[0] = found

    display.start(run)
    flags = settings.megatron_flags(data, folder / "tensorboard") + techniques
    seconds = run_torchrun(settings.processes, flags, folder, follow, deadline)
    record = read_events(folder / "tensorboard")
    record.require(REQUIRED)
    # What a person repeats must not write into the folder of a run that is over.
    command = torchrun_command(settings.processes, settings.megatron_flags(data, Path("tensorboard")) + techniques)
    return Run(record, command, said[0], seconds)


def show(console: Console, outcome: Outcome) -> None:
    """The tables, and in red what does not add up."""
    comparison = outcome.comparison
    for text in (comparison.losses().markdown(), comparison.traffic().markdown(), time_remark(comparison)):
        console.print(Markdown(text))
    if complaints := comparison.complaints():
        body = "The traffic counters contradict each other; do not trust them:\n- " + "\n- ".join(complaints)
        console.print(Panel(body, title="CROSS-CHECK FAILED", style="bold red"))
    console.print()
