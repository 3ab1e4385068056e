"""One training run on the hosts: torchrun on each of them, its log followed, the links' rate changed on the way."""

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cluster_model import Layout  # also puts the checkout on the path
from cluster_network import INTERFACE, Counters, Network
from cluster_plan import Plan

from optimus_cc_ext.report.log_lines import Progress, failure_reason, parse_progress, parse_techniques

__all__ = ["Iteration", "Run", "RunFailed", "parse_traffic", "train"]

_ROOT = Path(__file__).resolve().parents[2]
_TIED = ["setpriv", "--pdeathsig", "KILL"]
"""In front of torchrun and of its ranks, which have sessions of their own: they end with their parent."""
_PORT = 29500
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 30.0
"""For the other hosts to end, or to say why they failed, once the first has ended."""

_FAILED_GRACE_SECONDS = 3.0
_TAIL_LINES = 30
_TRAFFIC = "optimus-cc traffic per iteration | "
_OURS = "optimus-cc: "
_FORECASTS = (f"{_OURS}forecast", f"{_OURS}--dp-compression-stages auto:")
_TRAFFIC_PART = re.compile(r"(?P<name>[^|:]+): (?P<sent>[\d.]+) of (?P<raw>[\d.]+) MB")


class RunFailed(RuntimeError):
    """A run ended badly. `log`: what the host that failed printed; `tail`: its last lines."""

    def __init__(self, reason: str, log: Path, tail: list[str]) -> None:
        super().__init__(reason)
        self.log, self.tail = log, tail


@dataclass
class Iteration:
    """One iteration, as Megatron and the kernel saw it."""

    number: int
    rate: str
    measured: bool
    """The rate was in force from its beginning, and it is none of the first."""

    seconds: float
    loss: float
    sent: list[int]
    """Bytes that each host's interface sent since the last log line, all layers' headers included."""

    packets: list[int]
    payload: list[int]
    """The same bytes without Ethernet, IP and TCP headers."""

    retransmitted: int
    traffic: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Class to (sent, raw) bytes of all ranks, by the package's own metrics; empty where they are off."""


@dataclass
class Run:
    """What one run has shown."""

    model: str
    layout: str
    variant: str
    block: int
    flags: list[str]
    """Ours only."""

    seed: int = 1234

    techniques: str = ""
    """What the hooks said is switched on."""

    forecast: list[str] = field(default_factory=list)
    """What the package said it measured, chose and expects."""

    iterations: list[Iteration] = field(default_factory=list)
    validation_loss: float | None = None
    """After the last iteration."""

    seconds: float = 0.0
    """From the start of torchrun to the end of the last process."""

    log: str = ""


def parse_traffic(line: str) -> dict[str, tuple[float, float]] | None:
    """Read class to (sent, raw) bytes from the metrics' line; None for any other."""
    if _TRAFFIC not in line:
        return None
    parts = _TRAFFIC_PART.finditer(line.split(_TRAFFIC)[1])
    return {part["name"].strip(): (1e6 * float(part["sent"]), 1e6 * float(part["raw"])) for part in parts}


class _Follower:
    """Turns the last rank's lines into iterations, and asks the plan for the links' rate."""

    def __init__(self, run: Run, network: Network, plan: Plan, on_iteration: Callable[[Iteration], None]) -> None:
        self._run, self._network, self._plan, self._on_iteration = run, network, plan, on_iteration
        self._before = network.counters()
        self._switched = False

    def take(self, line: str) -> None:
        if progress := parse_progress(line):
            if progress.seconds is None:
                # After training Megatron evaluates once more, on other samples.
                if self._run.validation_loss is None:
                    self._run.validation_loss = progress.loss
            else:
                self._iteration(progress, progress.seconds)
        elif (traffic := parse_traffic(line)) is not None and self._run.iterations:
            self._run.iterations[-1].traffic = traffic

    def _iteration(self, progress: Progress, seconds: float) -> None:
        now = self._network.counters()
        measured = progress.iteration > self._plan.warm_up and not self._switched
        # Before all else: the next iteration has begun.
        rate_before = self._network.rate
        rate = self._plan.after(progress.iteration, seconds, measured=measured)
        self._switched = rate != rate_before
        if self._switched:
            self._network.set_rate(rate)
        sent = [new.since(old) for new, old in zip(now, self._before, strict=True)]
        self._before = now
        self._run.iterations.append(_record(progress, seconds, rate_before, measured, sent))
        self._on_iteration(self._run.iterations[-1])


def _record(progress: Progress, seconds: float, rate: str, measured: bool, sent: Sequence[Counters]) -> Iteration:
    return Iteration(
        number=progress.iteration, rate=rate, measured=measured, seconds=seconds, loss=progress.loss,
        sent=[each.sent_bytes for each in sent], packets=[each.sent_packets for each in sent],
        payload=[each.payload for each in sent], retransmitted=sum(each.retransmitted for each in sent),
    )  # fmt: skip


def train(
    run: Run, network: Network, layout: Layout, flags: Sequence[str], folder: Path, plan: Plan, *,
    deadline: float, on_iteration: Callable[[Iteration], None] = lambda iteration: None,
) -> Run:  # fmt: skip
    """Run `flags` on all hosts and fill `run`. Each host's output goes to folder/host<i>.txt.

    `deadline` is in the time of time.monotonic. Returns or raises only when no process is left on the hosts.

    Raises:
        RunFailed: a host failed, or the deadline passed.
    """
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"host{host}.txt" for host in range(layout.hosts)]
    run.log = str(logs[-1])
    network.set_rate(plan.initial)
    follower = _Follower(run, network, plan, on_iteration)
    streams: list[IO[bytes]] = [log.open("wb") for log in logs]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for host, stream in enumerate(streams):
            # The last rank of the last host is the one that logs; its lines are wanted at once, not at the next poll.
            output = subprocess.PIPE if host == layout.hosts - 1 else stream
            process = network.popen(
                host, _torchrun(layout, host, network.address(0), flags), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, env=_environment(), cwd=_ROOT,
            )  # fmt: skip
            processes.append(process)
        _follow(processes, streams[-1], follower, deadline, logs)
    finally:
        for process in processes:
            # It may not have entered its host yet, where `network.kill` looks for it.
            process.kill()
        network.kill()
        for process in processes:
            process.wait(_GRACE_SECONDS)
            if process.stdout is not None:
                process.stdout.close()
        for stream in streams:
            stream.close()
    run.techniques, run.forecast = _said(logs)
    run.seconds = time.monotonic() - started
    return run


def _torchrun(layout: Layout, host: int, master: str, flags: Sequence[str]) -> list[str]:
    return [
        *_TIED, sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={layout.hosts}", f"--node-rank={host}", f"--nproc-per-node={layout.tensor}",
        f"--master-addr={master}", f"--master-port={_PORT}", f"--log-dir={os.devnull}",
        "--no-python", *_TIED, sys.executable, "-m", "optimus_cc_ext", *flags,
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment |= {"OMP_NUM_THREADS": "1", "OPTIMUS_CC_DEVICE": "cpu", "PYTHONUNBUFFERED": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": INTERFACE}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


def _follow(
    processes: Sequence[subprocess.Popen[bytes]], stream: IO[bytes], follower: _Follower, deadline: float,
    logs: Sequence[Path],
) -> None:  # fmt: skip
    """Until all processes have ended well."""
    pipe = processes[-1].stdout
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    rest = b""
    first_end: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            # Asked first, read second: what was printed before the end is never missed.
            statuses = [process.poll() for process in processes]
            if selector.select(_POLL_SECONDS) and selector.get_map():
                chunk = pipe.read(1 << 16)
                if chunk == b"":
                    selector.unregister(pipe)
                stream.write(chunk or b"")
                stream.flush()
                *lines, rest = (rest + (chunk or b"")).split(b"\n")
                for line in lines:
                    follower.take(line.decode("utf-8", errors="replace"))
                if chunk:
                    continue
            now = time.monotonic()
            failed = [host for host, status in enumerate(statuses) if status]
            ended = any(status is not None for status in statuses)
            first_end = first_end or (now if ended else None)
            if failed and first_end is not None and now > first_end + _FAILED_GRACE_SECONDS:
                raise _failure(failed, statuses, logs)
            if not failed and all(status == 0 for status in statuses) and not selector.get_map():
                return
            if first_end is not None and now > first_end + _GRACE_SECONDS:
                raise _failed("some hosts did not end with the others", logs[-1])
            if now > deadline:
                raise _failed("it was not finished in time (--timeout MINUTES gives it more)", logs[-1])
            if not selector.get_map():
                time.sleep(_POLL_SECONDS)


def _failure(failed: Sequence[int], statuses: Sequence[int | None], logs: Sequence[Path]) -> RunFailed:
    """The cause: a refusal or an error that a host names, the first host that names one."""
    reasons = {host: failure_reason(_lines(logs[host])) for host in failed}
    # A connection that was lost is how the others learn of it.
    lost = ("closed by peer", "Connection reset", "Broken pipe", "Connection closed", "ConnectionError")
    named = [host for host in failed if reasons[host] and not any(word in str(reasons[host]) for word in lost)]
    host = (named or list(failed))[0]
    return _failed(f"host {host}: {reasons[host] or f'torchrun ended with status {statuses[host]}'}", logs[host])


def _failed(reason: str, log: Path) -> RunFailed:
    return RunFailed(reason, log, _lines(log)[-_TAIL_LINES:])


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def _said(logs: Sequence[Path]) -> tuple[str, list[str]]:
    """The techniques, and the lines of the forecast, which the first rank prints."""
    lines = [line for log in logs for line in _lines(log)]
    techniques = next((found for line in lines if (found := parse_techniques(line))), "")
    return techniques, [line.removeprefix(_OURS) for line in lines if line.startswith(_FORECASTS)]
