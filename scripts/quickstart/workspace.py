"""Where a quickstart works: results appear at once and complete, and one output belongs to one run at a time.

DIR             the finished results; replaced only by a run that has finished
DIR.unfinished  what is being made; kept after a failure for its log, removed by the next start
DIR-data        tokenizer and tokens, made once
.DIR.lock       held while a quickstart runs
"""

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from optimus_cc_ext.data.output import check_replaceable, replace
from optimus_cc_ext.report.comparison import FILES
from scripts.quickstart.settings import RUNS, QuickstartError

__all__ = ["Workspace", "claim"]

_OURS = {*RUNS, "summary.json", "index.html", *FILES}


@dataclass(frozen=True)
class Workspace:
    """The folders of one output, absolute."""

    output: Path

    @property
    def unfinished(self) -> Path:
        """Where everything is written until it is complete."""
        return self.output.with_name(f"{self.output.name}.unfinished")

    @property
    def data(self) -> Path:
        """The prepared text."""
        return self.output.with_name(f"{self.output.name}-data")

    def run_folder(self, run: str) -> Path:
        """Folder of one run's log and TensorBoard events, made if it is not there."""
        folder = self.unfinished / run
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def discard(self) -> None:
        """Remove what is unfinished."""
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def publish(self) -> None:
        """Put what is now complete in the place of earlier results."""
        # Signals wait: half way, neither the old results nor the new ones are in place.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            replace(self.unfinished, self.output)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def claim(output: Path, source: Path) -> Iterator[Workspace]:
    """Hold the only right to write `output`, and clear away what an unfinished run left; `source` is the input.

    Raises:
        QuickstartError: another quickstart holds it.
        DataError: `output` holds what a quickstart has not made, or the input.
    """
    workspace = Workspace(Path(os.path.abspath(output)))
    check_replaceable(workspace.output, source.resolve(), _OURS)
    check_replaceable(workspace.unfinished, source.resolve(), _OURS)
    workspace.output.parent.mkdir(parents=True, exist_ok=True)
    lock = workspace.output.with_name(f".{workspace.output.name}.lock")
    # Never removed: the kernel lets go of it with the process, however that ends, and an empty file harms nobody.
    with lock.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            # Anybody may write into the file: only a number is repeated.
            holder = stream.read(20).strip()
            raise QuickstartError(
                f"another quickstart (process {holder if holder.isdecimal() else 'unknown'}) is writing to {output}."
                " Wait for it or end it, or give another --output"
            ) from None
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        workspace.discard()
        yield workspace
