"""The order of things: check, prepare the text, train twice, write the results, show them."""

import argparse
import dataclasses
import logging
import sys
import sysconfig
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.panel import Panel

from optimus_cc_ext.data import PreparedData, prepare
from optimus_cc_ext.devices.shared_gpu import Device
from optimus_cc_ext.report.comparison import REQUIRED
from optimus_cc_ext.report.log_lines import parse_progress, parse_techniques
from optimus_cc_ext.report.record import read_events
from scripts.hosts.launch import RunFailed, run_on_hosts, run_torchrun, torchrun_command
from scripts.hosts.network import UNSHAPED, bits_per_second, network, why_not
from scripts.quickstart.display import Display
from scripts.quickstart.outcome import Outcome, Run
from scripts.quickstart.settings import RUNS, TINY, QuickstartError, Settings, check_flags, check_text, device_here
from scripts.quickstart.workspace import Workspace, claim

__all__ = ["compare", "show"]


def compare(options: argparse.Namespace, further: list[str]) -> int:
    """Do what `options` ask for, `further` being flags of the compressed run; return the exit status."""
    # On a machine with CUDA's tools and no GPU it says so where Megatron is imported; here that is the plan.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    settings, no_links = _settings(options)
    check_flags(settings, further)
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
            _introduce(console, settings, data, text, no_links)
            with Display(console, settings.iterations) as display:
                runs = {
                    run: _train(
                        run, workspace, settings, data, settings.technique_flags(run, further), display, deadline
                    )
                    for run in RUNS
                }
            outcome = Outcome(settings, no_links, text, data, preparation, runs)
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


def _settings(options: argparse.Namespace) -> tuple[Settings, str]:
    """The settings, and why there are no shaped links, if so."""
    settings = TINY if options.tiny else Settings()
    iterations = settings.iterations if options.iterations is None else options.iterations
    if iterations < 8:
        raise QuickstartError(f"--iterations {iterations}: the first three are not timed. Give 8 or more")
    if not options.timeout > 0:
        raise QuickstartError(f"--timeout {options.timeout:g}: no time at all. Give a positive number of minutes")
    rate = options.rate or settings.rate
    try:
        bits_per_second(rate)
    except ValueError as error:
        raise QuickstartError(f"--rate: {error}") from None
    device = device_here(settings.processes)
    no_links = "--rate none" if rate == UNSHAPED else _instead_of_hosts(device, settings.processes) or why_not() or ""
    if options.input or iterations != settings.iterations:
        settings = dataclasses.replace(settings, vanilla_band=None)
    rate = settings.rate if rate == UNSHAPED else rate
    return dataclasses.replace(settings, iterations=iterations, rate=rate, shaped=not no_links, device=device), no_links


def _instead_of_hosts(device: Device, ranks: int) -> str:
    """Why ranks that train on GPUs have no hosts of their own; empty on a CPU."""
    if device == "shared-gpu":
        return f"{ranks} ranks share fewer GPUs, in bf16 and through host memory: times mean nothing"
    return "the ranks train on GPUs" if device == "cuda" else ""


def _introduce(console: Console, settings: Settings, data: PreparedData, text: str, no_links: str) -> None:
    state = "kept from an earlier run" if data.up_to_date else "prepared"
    links = (
        f"hosts: {settings.hosts}"
        if settings.shaped
        else f"hosts: none, all ranks share this machine ({no_links}); what slow links would gain is planned"
    )
    console.print(
        f"text: {text}: {data.text_bytes / 1e6:.1f} MB, {data.tokens:,} tokens ({state})",
        f"model: GPT with {settings.parameters / 1e6:.1f} million parameters: {settings.model}",
        f"layout: {settings.layout}", links, "", sep="\n", markup=False,
    )  # fmt: skip


def _train(
    run: str, workspace: Workspace, settings: Settings, data: PreparedData, techniques: list[str],
    display: Display, deadline: float,
) -> Run:  # fmt: skip
    folder = workspace.run_folder(run)
    display.start(run)
    flags = settings.megatron_flags(data, folder / "tensorboard") + techniques
    with ExitStack() as stack:
        hosts = stack.enter_context(network(settings.processes)) if settings.shaped else None

        def follow(line: str) -> None:
            if progress := parse_progress(line):
                if hosts is not None and progress.seconds and progress.iteration >= settings.shaping_ends:
                    hosts.set_rate(UNSHAPED)
                display.advance(run, progress)

        if hosts is None:
            seconds = run_torchrun(settings.processes, flags, folder, follow, deadline, settings.device)
        else:
            hosts.set_rate(settings.rate)
            logs = [folder / f"host{host}.txt" for host in range(settings.processes)]
            seconds = run_on_hosts(hosts, 1, flags, logs, follow, deadline)
    record = read_events(folder / "tensorboard")
    record.require(REQUIRED)
    # What a person repeats must not write into the folder of a run that is over.
    shown = settings.megatron_flags(data, Path("tensorboard")) + techniques
    command = torchrun_command(settings.processes, shown, settings.device)
    lines = (line for log in folder.glob("*.txt") for line in log.read_text(errors="replace").splitlines())
    said = next(filter(None, map(parse_techniques, lines)), "not said")
    return Run(record, command, tuple(techniques), said, seconds)


def show(console: Console, outcome: Outcome) -> None:
    """The tables, and in red what does not add up."""
    comparison = outcome.comparison
    for table in (comparison.losses(), comparison.times(), comparison.traffic()):
        console.print(Markdown(table.markdown()))
    if complaints := comparison.complaints():
        body = "The traffic counters contradict each other; do not trust them:\n- " + "\n- ".join(complaints)
        console.print(Panel(body, title="CROSS-CHECK FAILED", style="bold red"))
    console.print()
    for name, value, meaning in outcome.numbers():
        console.print(f"[bold]{value} {name}[/bold]: {escape(meaning)}")
    console.print()
