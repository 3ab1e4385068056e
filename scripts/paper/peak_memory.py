"""`peak_memory.py COMMAND...`: run COMMAND and say at its end what memory each rank's process took at most.

Megatron reports the memory of GPUs. Where there is none, figure 12 is drawn from these lines:

    [Rank 3] peak resident memory (MB) | 812.41
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

_INTERVAL_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Run `argv`; signals that end a job are passed on. Returns its exit status, 128 + N after signal N."""
    process = subprocess.Popen(argv)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _: process.send_signal(received))
    peaks: dict[int, int] = {}
    while True:
        try:
            status = process.wait(_INTERVAL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            for rank, peak in _peaks(psutil.Process(process.pid)):
                peaks[rank] = max(peak, peaks.get(rank, 0))
    for rank, peak in sorted(peaks.items()):
        print(f"[Rank {rank}] peak resident memory (MB) | {peak / 1024:.2f}", flush=True)
    return status if status >= 0 else 128 - status


def _peaks(root: psutil.Process) -> list[tuple[int, int]]:
    """(rank, KiB that its process has taken at most so far) of every rank below `root`. Linux only."""
    found = []
    with suppress(psutil.Error):
        for process in root.children(recursive=True):
            with suppress(psutil.Error, OSError, ValueError, StopIteration):
                rank = int(process.environ()["RANK"]) if "RANK" in process.environ() else None
                status = Path(f"/proc/{process.pid}/status").read_text()
                # The kernel keeps the highest value, so that nothing between two looks is missed.
                line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
                if rank is not None:
                    found.append((rank, int(line.split()[1])))
    return found


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {os.path.basename(sys.argv[0])} COMMAND...")
    sys.exit(main(sys.argv[1:]))
