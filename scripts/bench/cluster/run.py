"""One training run: torchrun on each host, the log followed, and the links' rate changed during the run."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optimus_cc_ext.config.classes import CLASSES, PARAM_GATHER
from optimus_cc_ext.metrics.traffic import BETWEEN_NODES
from optimus_cc_ext.tools.cpu.shared_gpu import Device
from optimus_cc_ext.tools.report.log_lines import Progress, parse_progress, parse_scalars, parse_techniques
from scripts.bench.cluster.rates import Plan
from scripts.experiments.models import Layout
from scripts.hosts.launch import lines_in
from scripts.hosts.launch import run as launch
from scripts.hosts.network import Network, network, seconds_of_delay

_FREE_CODING = "scripts/bench/cluster/free_coding.py"
"""Training script of the runs whose coding takes almost no time."""

_OURS = "optimus-cc: "
_TRAFFIC = {
    tag: (f"optimus-cc/{tag} sent bytes", f"optimus-cc/{tag} raw bytes")
    for tag in (*(traffic.tag for traffic in CLASSES), BETWEEN_NODES)
}
_TRIAL = re.compile(rf"{_OURS}(?:iterations \d+ to \d+: dense|no trial)")


@dataclass
class Iteration:
    """Iteration of a run, from Megatron's log and the kernel's counters."""

    number: int
    rate: str
    measured: bool
    """True if the rate was in force from the iteration's beginning, and the iteration is not one of the warm-up."""

    seconds: float
    loss: float
    payload: list[int]
    """Bytes that each host's interface sent since the last log line, without Ethernet, IP and TCP headers."""

    retransmitted: int
    traffic: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(sent, raw) bytes of all processes by class, from the package's own metrics; empty if these are off."""


@dataclass
class Run:
    """Results of one training run."""

    model: str
    layout: str
    variant: str
    block: int
    flags: list[str]
    """Flags of optimus_cc_ext only."""

    seed: int = 1234
    techniques: str = ""
    """Techniques that the hooks' log line says are on."""

    trial: list[str] = field(default_factory=list)
    """Log lines of the trial: its seconds, and its choice."""

    iterations: list[Iteration] = field(default_factory=list)
    log: str = ""
    commit: str = ""
    text: str = ""
    """Hash of the text that the run trained on."""


def free_coding(coded: Sequence[Iteration] = ()) -> list[str]:
    """Return the first words of a run whose coding takes almost no time.

    Args:
        coded: the iterations of the same run with coding, whose exact messages are as long.
    """
    both = [each.traffic[PARAM_GATHER.tag] for each in coded if PARAM_GATHER.tag in each.traffic]
    return [_FREE_CODING, ",".join(f"{sent / raw if raw else 1:.5f}" for sent, raw in both) or "1"]


class _Follower:
    """Follower of the last rank's log: it turns lines into iterations, and asks the plan for the links' rate."""

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
        # The rate is set before anything else, because the next iteration has already begun.
        rate_before = self._hosts.rate
        rate = self._plan.after(progress.iteration)
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
    seconds: float, on_iteration: Callable[[Iteration], None] = lambda iteration: None, device: Device = "cpu",
) -> Run:  # fmt: skip
    """Run `flags` on hosts that are made for the run, and fill `run`. Each host's output goes to folder/host<i>.txt.

    Raises:
        RunFailed: a host failed, or the run took longer than `seconds`.
        NetworkError: the hosts could not be made.
    """
    deadline = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    run.log = str(folder / f"host{layout.hosts - 1}.txt")
    with network(layout.hosts, delays=any(map(seconds_of_delay, plan.rates))) as hosts:
        hosts.set_rate(plan.rates[0])
        follower = _Follower(run, hosts, plan, on_iteration)
        launch(
            flags,
            folder,
            follower.take,
            deadline,
            ranks=layout.ranks_per_host,
            device=device,
            hosts=hosts,
            may_try=True,
        )
    lines = lines_in(folder)
    run.techniques = next((found for line in lines if (found := parse_techniques(line))), "")
    run.trial = [line.removeprefix(_OURS) for line in lines if _TRIAL.match(line)]
    return run
