"""Ranks that are forks of this process, which has imported Megatron once for all of them."""

import contextlib
import ctypes
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

__all__ = ["Forks", "run_forks"]


_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class Forks:
    """Ranks with torchrun's variables, each a process group of its own, whose output goes to `rank-N.log`."""

    def __init__(self, ranks: int, folder: Path, run: Callable[[int], None]) -> None:
        """Fork `ranks` ranks; each calls `run` with its number, and ends."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._pids: set[int] = set()
        parent = os.getpid()
        for rank in range(ranks):
            if pid := os.fork():
                self._pids.add(pid)
                continue
            _end_with(parent)
            os.setpgid(0, 0)
            log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TMPDIR": str(folder)}
            try:
                run(rank)
            except BaseException:
                traceback.print_exc()
            os._exit(0)

    @property
    def alive(self) -> bool:
        """True if a rank has not ended."""
        self._pids -= {pid for pid in self._pids if os.waitpid(pid, os.WNOHANG)[0]}
        return bool(self._pids)

    def end(self) -> None:
        """Kill the ranks that are left, with all that they started."""
        for pid in self._pids:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids.clear()


def _end_with(parent: int) -> None:
    """Let this fork end with its parent, `kill -9` included; at once if the parent has ended already."""
    ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run_forks(ranks: int, folder: Path, run: Callable[[int], None], limit: float) -> tuple[list[str], bool]:
    """Run ranks until they end, or for `limit` seconds; return their logs, and whether they were ended."""
    deadline = time.monotonic() + limit
    forks = Forks(ranks, folder, run)
    try:
        while forks.alive and time.monotonic() < deadline:
            time.sleep(0.2)
        late = forks.alive
    finally:
        forks.end()
    return [path.read_text(errors="replace") for path in sorted(folder.glob("rank-*.log"))], late
