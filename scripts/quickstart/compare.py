"""Steps of the quickstart: check, prepare the text, train twice, write the results, show them.

DIR             the finished results; replaced only by a run that has finished DIR.unfinished  the results of a run that
is under way; kept after a failure for its log, removed by the next start DIR-data        tokenizer and tokens, made
once .DIR.lock       held while a quickstart runs
"""

import argparse
import dataclasses
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from optimus_cc_ext.tools.cpu.shared_gpu import Device
from optimus_cc_ext.tools.data import PreparedData
from optimus_cc_ext.tools.data.output import check_replaceable, replace
from optimus_cc_ext.tools.report.comparison import FILES, REQUIRED
from optimus_cc_ext.tools.report.log_lines import Progress, parse_progress, parse_techniques
from optimus_cc_ext.tools.report.record import read_events
from scripts.experiments.command import told
from scripts.experiments.models import ExperimentError, device_here
from scripts.experiments.runs import claimed
from scripts.experiments.texts import text_of
from scripts.hosts.launch import RunFailed, lines_in, run, torchrun_command
from scripts.hosts.network import UNSHAPED, bits_per_second, network, why_not
from scripts.quickstart.outcome import Outcome, Run
from scripts.quickstart.settings import RUNS, TINY, Settings, check_text

_PLAIN_LINE_SECONDS = 15.0
_OURS = {*RUNS, "summary.json", "index.html", *FILES}


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Folders of one output, as absolute paths. Results appear at once and complete."""

    output: Path

    @property
    def unfinished(self) -> Path:
        """Folder for the files of all runs until the results are complete."""
        return self.output.with_name(f"{self.output.name}.unfinished")

    def run_folder(self, name: str) -> Path:
        """Make the folder of one run's log and TensorBoard events, if it is not there; return its path."""
        folder = self.unfinished / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def discard(self) -> None:
        """Remove the folder `unfinished` of a run that failed or was interrupted."""
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def publish(self) -> None:
        """Replace earlier results by the complete ones."""
        # Signals wait while folders are moved, because half way neither the old results nor the new ones are in place.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            replace(self.unfinished, self.output)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def claim(output: Path, source: Path) -> Iterator[Workspace]:
    """Hold the exclusive right to write `output`, and remove the rest of an unfinished run; `source` is the input.

    Raises:
        ExperimentError: another quickstart holds the right.
        DataError: `output` holds the input, or files that no quickstart has made.
    """
    workspace = Workspace(Path(os.path.abspath(output)))
    for folder in (workspace.output, workspace.unfinished):
        check_replaceable(folder, source.resolve(), _OURS)
    with claimed(workspace.output):
        workspace.discard()
        yield workspace


class Display:
    """Progress on the terminal: two moving bars, or a plain line now and then if the output is not a terminal."""

    def __init__(self, console: Console, iterations: int) -> None:
        columns = (
            TextColumn("{task.description:<10}"), BarColumn(bar_width=28), MofNCompleteColumn(),
            TextColumn("{task.fields[state]}{task.fields[validation]}"), TimeRemainingColumn(compact=True),
        )  # fmt: skip
        self._bars = Bars(*columns, console=console, disable=not console.is_terminal)
        self._tasks = {
            run: self._bars.add_task(run, total=iterations, start=False, state="", validation="") for run in RUNS
        }
        self._last_line = 0.0

    def __enter__(self) -> "Display":
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def start(self, run: str) -> None:
        """Show that the processes of `run` are being started."""
        self._bars.update(self._tasks[run], state="starting the processes")
        if self._bars.disable:
            self._bars.console.print(f"{run}: starting the processes")

    def advance(self, run: str, progress: Progress) -> None:
        """Show that `run` has trained an iteration, or validated."""
        task = self._bars.tasks[self._tasks[run]]
        if progress.seconds is None:
            self._bars.update(task.id, validation=f"  validation {progress.loss:.3f}")
            return
        if not task.started:
            self._bars.start_task(task.id)
        self._bars.update(task.id, completed=progress.iteration, state=f"loss {progress.loss:.3f}")
        at_an_end = progress.iteration in (1, task.total)
        if self._bars.disable and (at_an_end or time.monotonic() > self._last_line + _PLAIN_LINE_SECONDS):
            self._last_line = time.monotonic()
            left = "" if task.time_remaining is None else f", {task.time_remaining:.0f} s left"
            self._bars.console.print(
                f"{run}: iteration {progress.iteration}/{task.total}, loss {progress.loss:.3f}{left}"
            )


def compare(options: argparse.Namespace, further: list[str]) -> int:
    """Do what `options` ask for; `further` are flags of the compressed run. Return the exit status."""
    # This logger warns when Megatron is imported on a machine with CUDA's tools and no GPU, which is intended here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    settings, no_links = _settings(options)
    # A flag that cannot work is refused before the vanilla run takes its minutes.
    settings.config_of(settings.technique_flags("compressed", further))
    deadline = time.monotonic() + 60 * options.timeout
    text = text_of(options.input, options.pattern)
    console = Console(highlight=False)
    with claim(options.output, text.source) as workspace:
        try:
            started = time.monotonic()
            folder = workspace.output.with_name(f"{workspace.output.name}-data")
            data = text.prepared(folder, settings.model.vocabulary, options.max_mb, progress=console.is_terminal)
            check_text(settings, data)
            preparation = time.monotonic() - started
            _introduce(console, settings, data, text.name, no_links)
            with Display(console, settings.iterations) as display:
                runs = {
                    name: _train(
                        name, workspace, settings, data, settings.technique_flags(name, further), display, deadline
                    )
                    for name in RUNS
                }
            outcome = Outcome(settings, no_links, text.name, data, preparation, runs)
            outcome.write(workspace.unfinished)
            workspace.publish()
        except RunFailed as failure:
            # The failed run's log is kept, because the user needs it; the next start removes it.
            return told(failure)
        except BaseException:
            workspace.discard()
            raise
    show(console, outcome)
    console.print(f"{outcome.seconds / 60:.1f} minutes. Look at {workspace.output / 'index.html'}", soft_wrap=True)
    return 1 if outcome.comparison.complaints() else 0


def _settings(options: argparse.Namespace) -> tuple[Settings, str]:
    """Return the settings, and the reason why there are no shaped links, if there are none."""
    settings = TINY if options.tiny else Settings()
    iterations = settings.iterations if options.iterations is None else options.iterations
    if iterations < 8:
        raise ExperimentError(f"--iterations {iterations}: the first three iterations are not timed. Give 8 or more")
    if not options.timeout > 0:
        raise ExperimentError(f"--timeout {options.timeout:g}: no time at all. Give a positive number of minutes")
    rate = options.rate or settings.rate
    try:
        bits_per_second(rate)
    except ValueError as error:
        raise ExperimentError(f"--rate: {error}") from None
    device = device_here(settings.processes)
    no_links = "--rate none" if rate == UNSHAPED else _instead_of_hosts(device, settings.processes) or why_not() or ""
    if options.input or iterations != settings.iterations:
        settings = dataclasses.replace(settings, vanilla_band=None)
    rate = settings.rate if rate == UNSHAPED else rate
    return dataclasses.replace(settings, iterations=iterations, rate=rate, shaped=not no_links, device=device), no_links


def _instead_of_hosts(device: Device, ranks: int) -> str:
    """Return the reason why ranks that train on GPUs have no hosts of their own; empty on a CPU."""
    if device == "shared-gpu":
        return f"{ranks} ranks share fewer GPUs, in bf16, over NCCL: times are those of no cluster"
    return "the ranks train on GPUs" if device == "cuda" else ""


def _introduce(console: Console, settings: Settings, data: PreparedData, text: str, no_links: str) -> None:
    state = "kept from an earlier run" if data.up_to_date else "prepared"
    links = (
        f"hosts: {settings.hosts}"
        if settings.shaped
        else f"hosts: none, all ranks share this machine ({no_links}); the gain on slow links is planned"
    )
    console.print(
        f"text: {text}: {data.text_bytes / 1e6:.1f} MB, {data.tokens:,} tokens ({state})",
        f"model: GPT with {settings.parameters / 1e6:.1f} million parameters: {settings.described}",
        f"layout: {settings.arranged}", links, "", sep="\n", markup=False,
    )  # fmt: skip


def _train(
    name: str, workspace: Workspace, settings: Settings, data: PreparedData, techniques: list[str],
    display: Display, deadline: float,
) -> Run:  # fmt: skip
    folder = workspace.run_folder(name)
    display.start(name)
    flags = settings.megatron_flags(data, folder / "tensorboard") + techniques
    with network(settings.processes) if settings.shaped else nullcontext() as hosts:
        if hosts:
            hosts.set_rate(settings.rate)

        def follow(line: str) -> None:
            if progress := parse_progress(line):
                if hosts and progress.seconds and progress.iteration >= settings.shaping_ends:
                    hosts.set_rate(UNSHAPED)
                display.advance(name, progress)

        ranks = 1 if hosts else settings.processes
        seconds = run(flags, folder, follow, deadline, ranks=ranks, device=settings.device, hosts=hosts)
    record = read_events(folder / "tensorboard")
    record.require(REQUIRED)
    # A command that a person repeats must not write into the folder of a finished run.
    shown = settings.megatron_flags(data, Path("tensorboard")) + techniques
    command = torchrun_command(settings.processes, shown, settings.device)
    techniques_on = next(filter(None, map(parse_techniques, lines_in(folder))), "not logged")
    return Run(record, command, tuple(techniques), techniques_on, seconds)


def show(console: Console, outcome: Outcome) -> None:
    """Print the tables, and contradictions in red."""
    comparison = outcome.comparison
    for table in (comparison.losses(), comparison.times(), comparison.traffic()):
        console.print(Markdown(table.markdown()))
    if complaints := comparison.complaints():
        body = "The traffic counters contradict each other; do not trust them:\n- " + "\n- ".join(complaints)
        console.print(Panel(body, title="CROSS-CHECK FAILED", style="bold red"))
    console.print()
    for number in outcome.numbers():
        console.print(f"[bold]{number.value} {number.name}[/bold]: {escape(number.note)}")
    console.print()
