"""Runs that take minutes or hours: a finished run is never repeated, and no two processes write to one folder.

A finished run is one row: the measurements, our flags, and their origin (commit, seed, text).
"""

import csv
import errno
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_cc_ext._version import __version__
from optimus_cc_ext.tools.cpu.shared_gpu import Device
from optimus_cc_ext.tools.data.output import write_whole
from optimus_cc_ext.tools.report.log_lines import parse_progress
from optimus_cc_ext.tools.report.table import Table
from scripts.experiments.models import ExperimentError
from scripts.hosts.launch import RunFailed, run

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Runs:
    """Runs in the folders below `folder`, with one row each. A failed run is marked, and repeated on demand."""

    folder: Path
    text: str
    """Hash of the text of the training. A run on another text is repeated."""

    minutes: float
    """Limit of one run, in minutes."""

    retry: bool
    """True if failed runs are to be repeated."""

    device: Device = "cpu"
    """Device on which the ranks train."""

    def known(self, name: str, flags: Sequence[str]) -> dict[str, Any] | None:
        """Return the row of an earlier run with the same flags on the same text; None if there is none."""
        row = self._row(self.folder / name)
        # Rows of grid.csv from before 2026-11-25 do not name the text.
        return row if row.get("flags") == list(flags) and row.get("text", self.text) == self.text else None

    def made(
        self, name: str, processes: int, flags: Sequence[str], seed: int, read: Callable[[Path], dict[str, Any]], *,
        beside: int = 1, may_try: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the row of this run, from an earlier run with the same flags, or from a new one.

        `read` reads the measurements from the run's folder; `beside` consecutive ranks count as a node; `may_try`: a
        trial in the run may choose dense.

        Raises:
            RunFailed: the run failed, now or before, or `read` says so.
            OSError: the disk is full; the run is not marked as failed.
        """
        if known := self.known(name, flags):
            return known
        folder = self.folder / name
        failure = folder / "failed"
        if failure.exists() and not self.retry:
            raise RunFailed("it failed before (--retry trains it again)", folder / "log.txt")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"{name} ...", flush=True)
        try:
            deadline = time.monotonic() + 60 * self.minutes
            run(flags, folder, _tell, deadline, ranks=processes, device=self.device, beside=beside, may_try=may_try)
            found = read(folder)
        except RunFailed:
            if shutil.disk_usage(folder).free < 1 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
            failure.touch()
            raise
        row = {"commit": commit(), "seed": seed, "text": self.text, "flags": list(flags), **found}
        write_whole(folder / "result.json", json.dumps(row, indent=1))
        return row

    def rows(self) -> Table:
        """Return commit, seed and text of every finished run."""
        folders = sorted(path.parent for path in self.folder.glob("*/result.json"))
        columns = ("commit", "seed", "text")
        found = [(folder.name, *map(self._row(folder).get, columns)) for folder in folders]
        return Table(("run", *columns), found, name="runs")

    def _row(self, folder: Path) -> dict[str, Any]:
        path = folder / "result.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _tell(line: str) -> None:
    progress = parse_progress(line)
    if progress is not None and (progress.seconds is None or progress.iteration % 20 == 0):
        print(f"  {progress.iteration:5d}  {progress.loss:.4f}", flush=True)


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the finished runs in a CSV file, with all values as text; none if there is no file.

    Raises:
        ExperimentError: the file has other columns.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        rows = csv.DictReader(stream)
        if tuple(rows.fieldnames or ()) != tuple(columns):
            names = ", ".join(rows.fieldnames or ())
            raise ExperimentError(f"--rows {path}: the columns are {names}. Give another file")
        return list(rows)


def add_row(path: Path, row: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Append one finished run to a CSV file."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        if new:
            writer.writeheader()
        writer.writerow(row)


def commit() -> str:
    """Return the commit of the checkout that contains this file, or the package's version if there is no checkout."""
    if not (_ROOT / ".git").exists():
        return __version__
    git = ["git", "-C", str(_ROOT)]
    found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    # CSV files hold the rows of finished runs, which do not change what a run measures.
    command = [*git, "diff", "--quiet", "HEAD", "--", ".", ":(exclude)*.csv"]
    changed = subprocess.run(command, capture_output=True, check=False).returncode
    return f"{found}{'-dirty' * bool(changed)}" if found else __version__


@contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Hold the exclusive right to write to the folder `output`.

    Raises:
        ExperimentError: another process holds it.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    # The lock file is never removed: the kernel releases the lock when the process ends, however it ends, and an empty
    # file does no harm.
    with output.with_name(f".{output.name}.lock").open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            # Anybody may write into the lock file, so only a number from it is repeated.
            holder = stream.read(20).strip()
            raise ExperimentError(
                f"--output {output}: another process ({holder if holder.isdecimal() else 'unknown'}) is writing to it."
                " Wait for it or end it, or give another folder"
            ) from None
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield
