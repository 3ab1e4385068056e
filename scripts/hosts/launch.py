"""Launcher of one training run, with its ranks on hosts or on this machine; it follows the log and leaves nothing
behind.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.tools.cpu.shared_gpu import Device
from optimus_cc_ext.tools.report.log_lines import failure_reason, parse_left_dense, stays_dense
from scripts.hosts import gpus
from scripts.hosts.network import INTERFACE, Network

_ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 30.0
"""Seconds for the other hosts to end after the first has ended."""

_FAILED_GRACE_SECONDS = 3.0
"""Seconds for the other hosts to print why they failed."""

_LOST = ("closed by peer", "Connection reset", "Broken pipe", "Connection closed", "ConnectionError")
_CURES = {
    "Duplicate GPU detected": "NCCL refuses two ranks on one GPU although each has an NCCL_HOSTID: update PyTorch",
    "shared memory segment /dev/shm": "/dev/shm is full: a container needs more (docker run --shm-size=1g)",
    "Too many open files": "a process may open too few files: `ulimit -n` has to show 4096 or more",
}
"""Cures of failures on a GPU, by what NCCL or CUDA prints."""

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
    may_try: bool = False,
) -> float:  # fmt: skip
    """Run `flags` with `ranks` ranks on this machine, or on each of `hosts`; return the seconds that the run took.

    On this machine each `beside` consecutive ranks count as a node, unless OPTIMUS_CC_NODE is set. On hosts with the
    device "cuda", rank r has the GPU r mod the number of this machine's GPUs, which all hosts share.

    The output goes to folder/log.txt, or to folder/host<i>.txt of each host. `on_line` gets it line by line; with
    several hosts it gets the lines of the last host, on whose last rank Megatron logs. `deadline` is in the time of
    time.monotonic. The function returns or raises only when no process of the run is left.

    Args:
        may_try: True if a trial in the run may choose dense.

    Raises:
        RunFailed: a rank failed, the deadline passed, or a class that was asked for was left dense, also by a trial.
    """
    started, on_gpu = time.monotonic(), device == "shared-gpu" or (hosts is not None and device == "cuda")
    logs = [folder / (f"host{host}.txt" if hosts else "log.txt") for host in range(len(hosts) if hosts else 1)]
    with ExitStack() as stack:
        if on_gpu:
            stack.enter_context(gpus.together())
            # This comes after all ranks have ended, because it is registered before they start.
            stack.push(lambda failed, *_: gpus.refusal() if failed else None)
        outputs = [stack.enter_context(log.open("w", encoding="utf-8")) for log in logs]
        if hosts is None:
            outputs[0].write(f"$ {torchrun_command(ranks, flags, device, beside)}\n\n")
            outputs[0].flush()
        # The ranks meet in this process, which finds a free port, so that several runs can share one machine.
        store = None if hosts else torch.distributed.TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
        processes = []
        for rank in range(ranks * len(logs)):
            places = {"RANK": rank, "WORLD_SIZE": ranks * len(logs), "LOCAL_RANK": rank % ranks,
                      "LOCAL_WORLD_SIZE": ranks}  # fmt: skip
            variables = _environment(device, beside) | {name: str(value) for name, value in places.items()}
            processes.append(_start(rank // ranks, flags, variables, outputs[rank // ranks], hosts, store))
            stack.callback(_end, processes[-1])
        _follow(processes, logs, on_line, deadline)
    for log in logs:
        if classes := next(filter(None, map(parse_left_dense, _lines(log))), None):
            raise RunFailed(f"nothing leaves a node (OPTIMUS_CC_NODE), so nothing was compressed of {classes}", log)
        if not may_try and any(map(stays_dense, _lines(log))):
            raise RunFailed("its trial chose dense, so nothing was compressed. Give --no-compression-trial", log)
    return time.monotonic() - started


def lines_in(folder: Path) -> list[str]:
    """Return all lines that a run printed, host after host."""
    return [line for log in sorted(folder.glob("*.txt")) for line in _lines(log)]


def _start(
    host: int, flags: Sequence[str], variables: dict[str, str], output: IO[str], hosts: Network | None,
    store: Any,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start one rank, on its host or on this machine; no torchrun is needed for ranks whose numbers are known."""
    command = [sys.executable, "-m", "optimus_cc_ext", *flags]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    if hosts is not None:
        # All hosts are one machine, so they share one name and all GPUs; NCCL needs to take them for different ones.
        rank, gpus_here = variables["RANK"], torch.cuda.device_count()
        variables |= {
            "OPTIMUS_CC_NODE": f"host{host}", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, "NCCL_HOSTID": f"rank{rank}",
            "NCCL_IB_DISABLE": "1", **({"LOCAL_RANK": f"{int(rank) % gpus_here}"} if gpus_here else {}),
        }  # fmt: skip
        return hosts.popen(host, command, env=variables, **streams)
    variables |= {"MASTER_ADDR": store.host, "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # A rank ends with this process even if this process is killed. Ctrl-C goes to this process only, which then ends
    # the run in good order.
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    return subprocess.Popen([*tied, *command], env=variables, start_new_session=True, **streams)


def _environment(device: Device, beside: int) -> dict[str, str]:
    environment = dict(os.environ)
    # More threads than cores would make every rank much slower.
    environment |= {"OMP_NUM_THREADS": "1", "OPTIMUS_CC_DEVICE": device, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OPTIMUS_CC_NODE", f"ranks:{beside}")
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


def _follow(
    processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], on_line: Callable[[str], None], deadline: float
) -> None:
    """Follow the logs until all ranks have ended successfully."""
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
                raise RunFailed("some ranks were still running long after another had ended", logs[-1])
            if now > deadline:
                raise RunFailed("the run was not finished in time (--timeout MINUTES gives more time)", logs[-1])
            time.sleep(_POLL_SECONDS)


def _failure(statuses: Sequence[int | None], logs: Sequence[Path]) -> RunFailed:
    """Return the cause of a failure: a refusal or an error that a rank names, or the signal that ended a rank.

    Lost connections do not count, because other ranks report them when one fails.
    """
    found = []
    for rank, status in enumerate(statuses):
        if status:
            host = rank * len(logs) // len(statuses)
            said = failure_reason(_lines(logs[host])) or f"rank {rank} ended with status {status}"
            if status < 0 and status != -signal.SIGABRT:  # a rank whose peer is gone aborts itself
                said = f"rank {rank} was ended by Signal {-status} ({signal.Signals(-status).name})"
            found.append((any(word in said for word in _LOST), host, said))
    _, host, reason = min(found)
    lines = _lines(logs[host])
    if cure := next((cure for said, cure in _CURES.items() if any(said in line for line in lines)), ""):
        reason = f"{cure} ({reason})"
    return RunFailed(f"host {host}: {reason}" if len(logs) > 1 else reason, logs[host])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a rank with all processes of its session, also if the rank has ended and left some."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()
