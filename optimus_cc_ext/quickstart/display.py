"""Progress on the terminal: two bars that move, or a plain line now and then where nobody watches a screen."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from optimus_cc_ext.quickstart.log_lines import Progress
from optimus_cc_ext.quickstart.settings import RUNS

__all__ = ["Display", "display"]

_PLAIN_LINE_SECONDS = 15.0


class Display(Protocol):
    """Is told what happens in the runs."""

    def start(self, run: str) -> None:
        """A run's processes are being started."""

    def advance(self, run: str, progress: Progress) -> None:
        """A run has trained an iteration, or validated."""


@contextmanager
def display(console: Console, iterations: int) -> Iterator[Display]:
    """The display that fits the console, for two runs of so many iterations."""
    if not console.is_terminal:
        yield _PlainLines(console, iterations)
        return
    columns = (
        TextColumn("{task.description:<10}"), BarColumn(bar_width=28), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
    )  # fmt: skip
    with Bars(*columns, console=console) as bars:
        yield _MovingBars(bars, iterations)


class _Pace:
    """Remaining time: from the clock rather than from Megatron's iteration times, as validation takes time too."""

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations
        self._began: tuple[float, int] | None = None

    def remaining(self, iteration: int) -> str:
        now = time.monotonic()
        if self._began is None:
            self._began = now, iteration
        since, first = self._began
        if iteration == first:
            return "-:--"
        seconds = round((now - since) / (iteration - first) * (self._iterations - iteration))
        return f"{seconds // 60}:{seconds % 60:02d}"


class _MovingBars:
    def __init__(self, bars: Bars, iterations: int) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {
            run: bars.add_task(run, total=iterations, start=False, state="") for run in RUNS
        }
        self._paces = {run: _Pace(iterations) for run in RUNS}
        self._validation = dict.fromkeys(RUNS, "")

    def start(self, run: str) -> None:
        self._bars.update(self._tasks[run], state="starting the processes")

    def advance(self, run: str, progress: Progress) -> None:
        if progress.seconds is None:
            self._validation[run] = f"  validation {progress.loss:.3f}"
            return
        left = self._paces[run].remaining(progress.iteration)
        self._bars.update(
            self._tasks[run], completed=progress.iteration,
            state=f"loss {progress.loss:.3f}{self._validation[run]}  {left} left",
        )  # fmt: skip


class _PlainLines:
    def __init__(self, console: Console, iterations: int) -> None:
        self._console = console
        self._iterations = iterations
        self._paces = {run: _Pace(iterations) for run in RUNS}
        self._last = 0.0

    def start(self, run: str) -> None:
        self._console.print(f"{run}: starting the processes")

    def advance(self, run: str, progress: Progress) -> None:
        if progress.seconds is None:
            return
        left = self._paces[run].remaining(progress.iteration)
        now = time.monotonic()
        if now - self._last < _PLAIN_LINE_SECONDS and 1 < progress.iteration < self._iterations:
            return
        self._last = now
        self._console.print(
            f"{run}: iteration {progress.iteration}/{self._iterations}, loss {progress.loss:.3f}, {left} left"
        )
