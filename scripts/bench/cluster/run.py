"""One training run: torchrun on each host, the log followed, the links' rate changed on the way."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from optimus_cc_ext.metrics.traffic import TrafficClass
from optimus_cc_ext.report.log_lines import Progress, failure_reason, parse_progress, parse_scalars, parse_techniques
from scripts.bench.cluster.model import Layout
from scripts.bench.cluster.network import INTERFACE, Network, network
from scripts.bench.cluster.rates import Plan

__all__ = ["Iteration", "Run", "RunFailed", "train"]

_ROOT = Path(__file__).resolve().parents[3]
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 30.0
"""For the other hosts to end once the first has ended."""

_FAILED_GRACE_SECONDS = 3.0
"""For the others to say why they failed."""

_LOST = ("closed by peer", "Connection reset", "Broken pipe", "Connection closed", "ConnectionError")
_TAIL_LINES = 30
_OURS = "optimus-cc: "
_TRAFFIC = {
    name.value: (f"optimus-cc/{name.value} sent bytes", f"optimus-cc/{name.value} raw bytes") for name in TrafficClass
}
_FORECASTS = (f"{_OURS}forecast", f"{_OURS}--dp-compression-stages auto:")


class RunFailed(RuntimeError):
    """A run ended badly. `log`: what the host that failed printed; `tail`: its last lines."""

    def __init__(self, reason: str, log: Path) -> None:
        super().__init__(reason)
        self.log, self.tail = log, _lines(log)[-_TAIL_LINES:]


@dataclass
class Iteration:
    """One iteration, as Megatron and the kernel saw it."""

    number: int
    rate: str
    measured: bool
    """The rate was in force from its beginning, and it is none of the first."""

    seconds: float
    loss: float
    payload: list[int]
    """Bytes that each host's interface sent since the last log line, without Ethernet, IP and TCP headers."""

    retransmitted: int
    traffic: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Class to (sent, raw) bytes of all processes, by the package's own metrics; empty where they are off."""


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
    """After the last iteration; None: a run for its times."""

    log: str = ""


class _Follower:
    """Turns the last rank's lines into iterations, and asks the plan for the links' rate."""

    def __init__(self, run: Run, hosts: Network, plan: Plan, on_iteration: Callable[[Iteration], None]) -> None:
        self._run, self._hosts, self._plan, self._on_iteration = run, hosts, plan, on_iteration
        self._before = hosts.counters()
        self._switched = False

    def take(self, line: str) -> None:
        if progress := parse_progress(line):
            if progress.seconds is not None:
                self._iteration(progress, progress.seconds)
            elif self._run.validation_loss is None:  # after training Megatron evaluates once more, on other samples
                self._run.validation_loss = progress.loss
        elif self._run.iterations and (counted := parse_scalars(line)):
            self._run.iterations[-1].traffic |= {
                name: (counted[sent], counted[raw]) for name, (sent, raw) in _TRAFFIC.items() if sent in counted
            }

    def _iteration(self, progress: Progress, seconds: float) -> None:
        now = self._hosts.counters()
        measured = progress.iteration > self._plan.warm_up and not self._switched
        # Before all else: the next iteration has begun.
        rate_before = self._hosts.rate
        rate = self._plan.after(progress.iteration, seconds, measured=measured)
        self._switched = rate != rate_before
        if self._switched:
            self._hosts.set_rate(rate)
        sent = [new.since(old) for new, old in zip(now, self._before, strict=True)]
        self._before = now
        iteration = Iteration(
            number=progress.iteration, rate=rate_before, measured=measured, seconds=seconds, loss=progress.loss,
            payload=[each.payload for each in sent], retransmitted=sum(each.retransmitted for each in sent),
        )  # fmt: skip
        self._run.iterations.append(iteration)
        self._on_iteration(iteration)


def train(
    run: Run, layout: Layout, flags: Sequence[str], folder: Path, plan: Plan, *,
    seconds: float, on_iteration: Callable[[Iteration], None] = lambda iteration: None,
) -> Run:  # fmt: skip
    """Run `flags` on hosts made for it and fill `run`. Each host's output goes to folder/host<i>.txt.

    Raises:
        RunFailed: a host failed, or `seconds` were not enough.
        NetworkError: the hosts could not be made.
    """
    deadline = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"host{host}.txt" for host in range(layout.hosts)]
    run.log = str(logs[-1])
    # The hosts come last and go first: with them goes whatever still runs there.
    with ExitStack() as stack:
        streams = [stack.enter_context(log.open("wb")) for log in logs]
        hosts = stack.enter_context(network(layout.hosts))
        hosts.set_rate(plan.rates[0])
        follower = _Follower(run, hosts, plan, on_iteration)
        processes = [
            hosts.popen(
                host, _torchrun(layout, host, hosts.address(0), flags), stdin=subprocess.DEVNULL,
                stdout=stream, stderr=subprocess.STDOUT, env=_environment(),
            )
            for host, stream in enumerate(streams)
        ]  # fmt: skip
        _follow(processes, logs, follower, deadline)
    lines = [line for log in logs for line in _lines(log)]
    run.techniques = next((found for line in lines if (found := parse_techniques(line))), "")
    run.forecast = [line.removeprefix(_OURS) for line in lines if line.startswith(_FORECASTS)]
    return run


def _torchrun(layout: Layout, host: int, master: str, flags: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={layout.hosts}", f"--node-rank={host}", f"--nproc-per-node={layout.tensor}",
        f"--master-addr={master}", "--master-port=29500", f"--log-dir={os.devnull}",
        "-m", "optimus_cc_ext", *flags,
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment |= {"OMP_NUM_THREADS": "1", "OPTIMUS_CC_DEVICE": "cpu", "PYTHONUNBUFFERED": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": INTERFACE}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


def _follow(
    processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], follower: _Follower, deadline: float
) -> None:  # fmt: skip
    """Until all processes have ended well. The last rank, on the last host, is the one that logs."""
    rest = ""
    first_end: float | None = None
    with logs[-1].open(encoding="utf-8", errors="replace") as stream:
        while True:
            # Asked first, read second: what was printed before the end is never missed.
            statuses = [process.poll() for process in processes]
            *lines, rest = (rest + stream.read()).split("\n")
            for line in lines:
                follower.take(line)
            if all(status == 0 for status in statuses):
                return
            now = time.monotonic()
            if first_end is None and any(status is not None for status in statuses):
                first_end = now
            if any(statuses) and first_end is not None and now > first_end + _FAILED_GRACE_SECONDS:
                raise _failure(statuses, logs)
            if first_end is not None and now > first_end + _GRACE_SECONDS:
                raise RunFailed("some hosts did not end with the others", logs[-1])
            if now > deadline:
                raise RunFailed("it was not finished in time (--timeout MINUTES gives it more)", logs[-1])
            time.sleep(_POLL_SECONDS)


def _failure(statuses: Sequence[int | None], logs: Sequence[Path]) -> RunFailed:
    """The cause: a refusal or an error that a host names, but for lost connections, which is how the others learn."""
    reasons = {host: failure_reason(_lines(logs[host])) for host, status in enumerate(statuses) if status}
    named = [host for host, reason in reasons.items() if reason and not any(word in reason for word in _LOST)]
    host = (named or list(reasons))[0]
    return RunFailed(f"host {host}: {reasons[host] or f'torchrun ended with status {statuses[host]}'}", logs[host])


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()
