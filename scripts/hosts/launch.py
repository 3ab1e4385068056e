"""Launcher of one training run: torchrun on each host, or on this machine; it follows the log and leaves nothing
behind.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from optimus_cc_ext.devices.shared_gpu import Device
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.report.log_lines import failure_reason, parse_left_dense
from scripts.hosts.network import INTERFACE, Network

_ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 30.0
"""Seconds for the other hosts to end after the first has ended."""

_FAILED_GRACE_SECONDS = 3.0
"""Seconds for the other hosts to print why they failed."""

_KILL_SECONDS = 8.0
_LOST = ("closed by peer", "Connection reset", "Broken pipe", "Connection closed", "ConnectionError")
_TAIL_LINES = 40


class RunFailed(OptimusError):
    """Failed run. `log` is the output of the host that failed, `tail` the last lines of it."""

    def __init__(self, reason: str, log: Path) -> None:
        super().__init__(reason)
        self.log, self.tail = log, _lines(log)[-_TAIL_LINES:]


def torchrun_command(processes: int, flags: Sequence[str], device: Device = "cpu", beside: int = 1) -> str:
    """Return the command line that a person would type for a run on one machine, as if each `beside` consecutive ranks
    had a machine of their own.
    """
    variable = "OPTIMUS_CC_DEVICE=shared-gpu " if device == "shared-gpu" else ""
    return (
        f"OPTIMUS_CC_NODE=ranks:{beside} "
        + variable
        + shlex.join(["torchrun", "--standalone", f"--nproc_per_node={processes}", "-m", "optimus_cc_ext", *flags])
    )


def run(
    flags: Sequence[str], folder: Path, on_line: Callable[[str], None], deadline: float, *,
    ranks: int, device: Device = "cpu", hosts: Network | None = None, beside: int = 1,
) -> float:  # fmt: skip
    """Run `flags` with `ranks` ranks on this machine, or on each of `hosts`; return the seconds that the run took.

    On this machine each `beside` consecutive ranks count as a node, unless OPTIMUS_CC_NODE is set.

    The output goes to folder/log.txt, or to folder/host<i>.txt of each host. `on_line` gets it line by line; with
    several hosts it gets the lines of the last host, on whose last rank Megatron logs. `deadline` is in the time of
    time.monotonic. The function returns or raises only when no process of the run is left; processes on hosts end with
    the hosts.

    Raises:
        RunFailed: a rank failed, the deadline passed, or a class of traffic that was asked for was left dense.
    """
    started = time.monotonic()
    logs = [folder / (f"host{host}.txt" if hosts else "log.txt") for host in range(len(hosts) if hosts else 1)]
    with ExitStack() as stack:
        outputs = [stack.enter_context(log.open("w", encoding="utf-8")) for log in logs]
        if hosts is None:
            outputs[0].write(f"$ {torchrun_command(ranks, flags, device, beside)}\n\n")
            outputs[0].flush()
            processes = [stack.enter_context(_tied(ranks, flags, outputs[0], device, beside))]
        else:
            processes = [_on_host(hosts, host, ranks, flags, output) for host, output in enumerate(outputs)]
        _follow(processes, logs, on_line, deadline)
    for log in logs:
        if classes := next(filter(None, map(parse_left_dense, _lines(log))), None):
            raise RunFailed(f"nothing leaves a node (OPTIMUS_CC_NODE), so nothing was compressed of {classes}", log)
    return time.monotonic() - started


def lines_in(folder: Path) -> list[str]:
    """Return all lines that a run printed, host after host."""
    return [line for log in sorted(folder.glob("*.txt")) for line in _lines(log)]


def _on_host(
    hosts: Network, host: int, ranks: int, flags: Sequence[str], output: IO[str]
) -> subprocess.Popen[bytes]:  # fmt: skip
    torchrun = ["torch.distributed.run", f"--nnodes={len(hosts)}", f"--node-rank={host}", f"--nproc-per-node={ranks}"]
    meeting = [f"--master-addr={hosts.address(0)}", "--master-port=29500", f"--log-dir={os.devnull}"]
    return hosts.popen(
        host, [sys.executable, "-m", *torchrun, *meeting, "-m", "optimus_cc_ext", *flags],
        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        # All hosts are one machine, so they share one name.
        env=_environment(INTERFACE) | {"OPTIMUS_CC_NODE": f"host{host}"},
    )  # fmt: skip


@contextmanager
def _tied(processes: int, flags: Sequence[str], output: IO[str], device: Device, beside: int) -> Iterator[psutil.Popen]:
    """Start torchrun; end its whole process tree on exit."""
    # torchrun starts its ranks in sessions of their own, where no signal to a process group reaches them. With this
    # command in front of torchrun and of each rank, all of them end with this process even if it is killed by SIGKILL.
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else ["env"]
    # --standalone makes a rendezvous on a free port, so that several runs can share one machine. Without --log-dir each
    # run would leave an empty folder in the temporary directory.
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", f"--log-dir={os.devnull}"]
    process = psutil.Popen(
        [*tied, sys.executable, "-m", *torchrun, "--no-python", *tied, sys.executable, "-m", "optimus_cc_ext", *flags],
        # All ranks are on this machine: without an interface, gloo depends on how the machine resolves its own name.
        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment("lo", device, beside),
        # Ctrl-C goes to this process only, which then ends the run in good order.
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        _end_tree(process)


def _environment(interface: str, device: Device = "cpu", beside: int = 1) -> dict[str, str]:
    environment = dict(os.environ)
    # More threads than cores would make every rank much slower.
    environment |= {"OMP_NUM_THREADS": "1", "OPTIMUS_CC_DEVICE": device, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OPTIMUS_CC_NODE", f"ranks:{beside}")
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": interface}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


def _follow(
    processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], on_line: Callable[[str], None], deadline: float
) -> None:
    """Follow the logs until all processes have ended successfully."""
    rest = ""
    first_end: float | None = None
    with logs[-1].open(encoding="utf-8", errors="replace") as stream:
        while True:
            # The statuses are read before the log, so that no line that was printed before the end is missed.
            statuses = [process.poll() for process in processes]
            *lines, rest = (rest + stream.read()).split("\n")
            for line in lines:
                on_line(line)
            if all(status == 0 for status in statuses):
                return
            now = time.monotonic()
            if first_end is None and any(status is not None for status in statuses):
                first_end = now
            all_printed = None not in statuses or (first_end is not None and now > first_end + _FAILED_GRACE_SECONDS)
            if any(statuses) and all_printed:
                raise _failure(statuses, logs)
            if first_end is not None and now > first_end + _GRACE_SECONDS:
                raise RunFailed("some hosts were still running long after another had ended", logs[-1])
            if now > deadline:
                raise RunFailed("the run was not finished in time (--timeout MINUTES gives more time)", logs[-1])
            time.sleep(_POLL_SECONDS)


def _failure(statuses: Sequence[int | None], logs: Sequence[Path]) -> RunFailed:
    """Return the cause of a failure: a refusal or an error that a host names.

    Lost connections do not count, because other hosts report them when one host fails.
    """
    reasons = {host: failure_reason(_lines(logs[host])) for host, status in enumerate(statuses) if status}
    named = [host for host, reason in reasons.items() if reason and not any(word in reason for word in _LOST)]
    host = (named or list(reasons))[0]
    where = f"host {host}: " if len(logs) > 1 else ""
    return RunFailed(f"{where}{reasons[host] or f'torchrun ended with status {statuses[host]}'}", logs[host])


def _end_tree(process: psutil.Popen) -> None:
    """End torchrun and its descendants, by SIGTERM at first."""
    tree = [process]
    with suppress(psutil.Error):
        tree += process.children(recursive=True)
    with suppress(psutil.Error):
        process.terminate()
    _, left = psutil.wait_procs(tree, timeout=_KILL_SECONDS)
    for survivor in left:
        with suppress(psutil.Error):
            survivor.kill()
    psutil.wait_procs(left, timeout=_KILL_SECONDS)


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()
