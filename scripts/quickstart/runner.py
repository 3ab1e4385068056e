"""One training run: torchrun with our launcher, its log followed, its processes ended whatever happens."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from optimus_cc_ext.report.log_lines import failure_reason
from scripts.quickstart.settings import QuickstartError

__all__ = ["RunFailed", "run_torchrun", "torchrun_command"]

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 8.0
_TAIL_LINES = 40


class RunFailed(QuickstartError):
    """A training run ended badly. `tail`: the last lines of its log."""

    def __init__(self, reason: str | None, log: Path) -> None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        super().__init__(reason or failure_reason(lines) or "torchrun failed")
        self.log = log
        self.tail = lines[-_TAIL_LINES:]


def torchrun_command(processes: int, flags: list[str]) -> str:
    """The command line that a person would type for this run."""
    return shlex.join(["torchrun", "--standalone", f"--nproc_per_node={processes}", "-m", "optimus_cc_ext", *flags])


def run_torchrun(
    processes: int, flags: list[str], folder: Path, on_line: Callable[[str], None], deadline: float
) -> float:
    """Run `flags` on `processes` ranks of this machine; return the seconds it took.

    Everything that it prints goes to folder/log.txt, and line by line to `on_line`. `deadline` is in the time of
    time.monotonic. Returns or raises only when no process of the run is left.

    Raises:
        RunFailed: a rank failed, or the deadline passed.
    """
    log = folder / "log.txt"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        stream.write(f"$ {torchrun_command(processes, flags)}\n\n")
        stream.flush()
        with log.open(encoding="utf-8", errors="replace") as follower, _started(processes, flags, stream) as process:
            status, rest = None, ""
            while status is None:
                # Asked first, read second: what was printed before the end is never missed.
                status = process.poll()
                *lines, rest = (rest + follower.read()).split("\n")
                for line in lines:
                    on_line(line)
                if status is None and time.monotonic() > deadline:
                    raise RunFailed("it was not finished in time (--timeout MINUTES gives it more)", log)
                if status is None:
                    time.sleep(_POLL_SECONDS)
    if status != 0:
        raise RunFailed(None, log)
    return time.monotonic() - started


@contextmanager
def _started(processes: int, flags: list[str], output: IO[str]) -> Iterator[psutil.Popen]:
    """torchrun, running; on the way out its whole tree is ended."""
    # torchrun starts its ranks in sessions of their own, where no signal to a process group reaches them. With this
    # in front of torchrun and of each rank, all of them end with the quickstart even where that is killed by SIGKILL.
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else ["env"]
    # --standalone: a rendezvous on a free port, so that several quickstarts can run on one machine.
    # --log-dir: otherwise each run leaves an empty folder in the temporary directory.
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", f"--log-dir={os.devnull}"]
    process = psutil.Popen(
        [*tied, sys.executable, "-m", *torchrun, "--no-python", *tied, sys.executable, "-m", "optimus_cc_ext", *flags],
        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment(),
        # Ctrl-C is for the quickstart, which ends the run in good order.
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        _end_tree(process)


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # More threads than cores is slower by far; a model this small on few cores is the point of the quickstart.
    environment |= {"OMP_NUM_THREADS": "1", "OPTIMUS_CC_DEVICE": "cpu", "PYTHONUNBUFFERED": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # All ranks are here: without this, gloo depends on how the machine resolves its own name.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _end_tree(process: psutil.Popen) -> None:
    """End torchrun and all below it, kindly at first."""
    tree = [process]
    with suppress(psutil.Error):
        tree += process.children(recursive=True)
    with suppress(psutil.Error):
        process.terminate()
    _, left = psutil.wait_procs(tree, timeout=_GRACE_SECONDS)
    for survivor in left:
        with suppress(psutil.Error):
            survivor.kill()
    psutil.wait_procs(left, timeout=_GRACE_SECONDS)
