"""One folder a run: what is there is not made again, what failed is marked and made again on demand."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_cc_ext.devices.shared_gpu import Device
from optimus_cc_ext.report.log_lines import parse_progress
from scripts.hosts.launch import RunFailed, run_torchrun

__all__ = ["Runs"]


@dataclass(frozen=True)
class Runs:
    """The runs below `folder`."""

    folder: Path
    minutes: float
    """For one run."""

    retry: bool
    """Whether to make again what failed."""

    device: Device = "cpu"
    """What the ranks train on."""

    def known(self, name: str, flags: Sequence[str]) -> dict[str, Any] | None:
        """The result of a run of before with the same flags."""
        result = self.folder / name / "result.json"
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        return found if found.get("flags") == list(flags) else None

    def made(
        self, name: str, processes: int, flags: Sequence[str], read: Callable[[Path], dict[str, Any]]
    ) -> dict[str, Any]:
        """What `read` found in the folder of this run, now or when the same flags were run before.

        Raises:
            RunFailed: it failed, now or before.
            OSError: the disk is full; the run is not marked as one that failed.
        """
        if known := self.known(name, flags):
            return known
        folder = self.folder / name
        result, failure = folder / "result.json", folder / "failed"
        if failure.exists() and not self.retry:
            raise RunFailed("it failed before (--retry trains it again)", folder / "log.txt")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"{name} ...", flush=True)
        try:
            run_torchrun(processes, list(flags), folder, _tell, time.monotonic() + 60 * self.minutes, self.device)
        except RunFailed:
            if shutil.disk_usage(folder).free < 1 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
            failure.touch()
            raise
        found = {"flags": list(flags), **read(folder)}
        # Renamed when complete: neither an interruption nor a full disk leaves half a result.
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1))
        partial.replace(result)
        return found


def _tell(line: str) -> None:
    progress = parse_progress(line)
    if progress is not None and (progress.seconds is None or progress.iteration % 20 == 0):
        print(f"  {progress.iteration:5d}  {progress.loss:.4f}", flush=True)
