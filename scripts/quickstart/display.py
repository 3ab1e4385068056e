"""Progress on the terminal: two bars that move, or a plain line now and then where nobody watches a screen."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from optimus_cc_ext.report.log_lines import Progress
from scripts.quickstart.settings import RUNS

__all__ = ["Display"]

_PLAIN_LINE_SECONDS = 15.0


class Display:
    """Is told what happens in the runs, each of so many iterations."""

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
        """The processes of `run` are being started."""
        self._bars.update(self._tasks[run], state="starting the processes")
        if self._bars.disable:
            self._bars.console.print(f"{run}: starting the processes")

    def advance(self, run: str, progress: Progress) -> None:
        """`run` has trained an iteration, or validated."""
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
