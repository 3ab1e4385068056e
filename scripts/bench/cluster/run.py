"""One training run: torchrun on each host, the log followed, the links' rate changed on the way."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.report.log_lines import Progress, parse_progress, parse_scalars, parse_techniques
from scripts.bench.cluster.rates import Plan
from scripts.experiments.models import Layout
from scripts.hosts.launch import lines_in
from scripts.hosts.launch import run as launch
from scripts.hosts.network import Network, network

_OURS = "optimus-cc: "
_TRAFFIC = {
    traffic.tag: (f"optimus-cc/{traffic.tag} sent bytes", f"optimus-cc/{traffic.tag} raw bytes") for traffic in CLASSES
}
_FORECASTS = (f"{_OURS}forecast", f"{_OURS}--dp-compression-stages auto:")


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
    log: str = ""
    commit: str = ""
    text: str = ""
    """Hash of the text."""


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
    run.log = str(folder / f"host{layout.hosts - 1}.txt")
    with network(layout.hosts) as hosts:
        hosts.set_rate(plan.rates[0])
        follower = _Follower(run, hosts, plan, on_iteration)
        launch(flags, folder, follower.take, deadline, ranks=layout.tensor, hosts=hosts)
    lines = lines_in(folder)
    run.techniques = next((found for line in lines if (found := parse_techniques(line))), "")
    run.forecast = [line.removeprefix(_OURS) for line in lines if line.startswith(_FORECASTS)]
    return run
