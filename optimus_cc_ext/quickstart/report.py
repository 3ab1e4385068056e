"""Two runs side by side: the numbers, the tables for the terminal, and what must not be passed over in silence."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table

from optimus_cc_ext import __version__
from optimus_cc_ext.data import PreparedData
from optimus_cc_ext.quickstart.event_log import Curve, Record
from optimus_cc_ext.quickstart.settings import RUNS, Settings
from optimus_cc_ext.traffic import TrafficClass

__all__ = ["Outcome", "Run", "Share", "cross_check", "relative", "render", "shares", "summarize", "time_remark"]

_NOTICEABLE = 0.05
"""Differences in time below this are the machine's noise."""


@dataclass(frozen=True)
class Run:
    """One finished run. `techniques` is the hooks' own word for what was on; `seconds` includes the start."""

    record: Record
    command: str
    techniques: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """A finished quickstart. `text` is how a person would call the input; `remarks` see `settings.remarks`."""

    settings: Settings
    remarks: tuple[str, ...]
    text: str
    data: PreparedData
    preparation_seconds: float
    runs: Mapping[str, Run]

    @property
    def vanilla(self) -> Record:
        return self.runs["vanilla"].record

    @property
    def compressed(self) -> Record:
        return self.runs["compressed"].record

    @property
    def seconds(self) -> float:
        """Of everything together."""
        return self.preparation_seconds + sum(run.seconds for run in self.runs.values())


@dataclass(frozen=True)
class Share:
    """Bytes of one traffic class in an iteration of the compressed run, of all ranks together."""

    name: str
    raw: float
    sent: float

    @property
    def ratio(self) -> float:
        """sent / raw; 1 where there is no such traffic."""
        return self.sent / self.raw if self.raw else 1.0


def shares(record: Record) -> list[Share]:
    """Raw and sent bytes per iteration of each class, then of all of them."""
    classes = [
        Share(traffic_class.value, traffic.raw_per_iteration, traffic.sent_per_iteration)
        for traffic_class, traffic in record.traffic.items()
    ]
    return [*classes, Share("all traffic", sum(s.raw for s in classes), sum(s.sent for s in classes))]


def relative(new: float, old: float) -> float:
    """How much larger `new` is than `old`, as a fraction of `old`."""
    return (new - old) / old


def cross_check(vanilla: Record, compressed: Record) -> list[str]:
    """What contradicts itself: "raw" must mean the same thing in both runs, namely what vanilla really sends."""
    complaints = []
    for name in TrafficClass:
        sent = vanilla.traffic[name].sent
        if vanilla.traffic[name].raw != sent:
            complaints.append(f"{name.value}: the vanilla run did not send its raw bytes")
        if compressed.traffic[name].raw != sent:
            complaints.append(
                f"{name.value}: the compressed run counts {compressed.traffic[name].raw_per_iteration:,.0f} raw bytes"
                f" per iteration, the vanilla run sent {vanilla.traffic[name].sent_per_iteration:,.0f}"
            )
    if vanilla.training.iterations != compressed.training.iterations:
        complaints.append("the two runs did not log the same iterations")
    return complaints


def time_remark(outcome: Outcome) -> str:
    """What the seconds mean: here no network is slow, so compression has nothing to win back."""
    change = relative(outcome.compressed.median_seconds, outcome.vanilla.median_seconds)
    why = "all ranks share one machine, where no network has to be waited for"
    if change > _NOTICEABLE:
        return f"Compression does not pay here: an iteration takes {change:.0%} longer, because {why}."
    if change < -_NOTICEABLE:
        return f"An iteration is {-change:.0%} shorter; do not take it for a speed-up of a cluster: {why}."
    return f"An iteration takes as long either way: {why}."


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Everything as plain JSON values: the content of summary.json. Seconds, bytes, nats per token."""
    complaints = cross_check(outcome.vanilla, outcome.compressed)
    final = {run: outcome.runs[run].record.validation.last for run in RUNS}
    return {
        "format": 1,
        "settings": asdict(outcome.settings) | {"parameters": outcome.settings.parameters},
        "remarks": outcome.remarks,
        "text": {
            "input": outcome.text,
            "bytes": outcome.data.text_bytes,
            "documents": outcome.data.documents,
            "tokens": outcome.data.tokens,
            "vocabulary": outcome.data.vocab_size,
        },
        "runs": {name: _run_summary(outcome.runs[name]) for name in RUNS},
        "comparison": {
            "final_validation_loss": final,
            "final_validation_loss_change": relative(final["compressed"], final["vanilla"]),
            "sent_over_raw": {share.name: share.ratio for share in shares(outcome.compressed)},
            "raw_equals_what_vanilla_sent": not complaints,
            "complaints": complaints,
        },
        "seconds": {"preparation": outcome.preparation_seconds, "total": outcome.seconds},
        "versions": _versions(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _run_summary(run: Run) -> dict[str, Any]:
    record = run.record
    return {
        "techniques": run.techniques,
        "command": run.command,
        "seconds": run.seconds,
        "seconds_per_iteration": {"median": record.median_seconds} | asdict(record.seconds),
        "training_loss": {"final": record.training.last} | asdict(record.training),
        "validation_loss": {"final": record.validation.last} | asdict(record.validation),
        "traffic_bytes_per_iteration": {
            share.name: {"raw": share.raw, "sent": share.sent, "sent_over_raw": share.ratio} for share in shares(record)
        },
        "traffic_bytes": {
            name.value: {"iterations": curves.raw.iterations, "raw": curves.raw.values, "sent": curves.sent.values}
            for name, curves in record.traffic.items()
        },
    }


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("megatron-core", "torch", "tokenizers")}
    return {"optimus_cc_ext": __version__, **packages, "python": platform.python_version()}


def render(outcome: Outcome) -> Group:
    """The tables for the terminal, and in red what does not add up."""
    parts: list[Any] = [_losses_table(outcome), "", _traffic_table(outcome), "", time_remark(outcome)]
    if complaints := cross_check(outcome.vanilla, outcome.compressed):
        body = "The traffic counters contradict each other; do not trust them:\n- " + "\n- ".join(complaints)
        parts.append(Panel(body, title="CROSS-CHECK FAILED", style="bold red"))
    return Group(*parts)


def _losses_table(outcome: Outcome) -> Table:
    table = Table(title=f"After {outcome.settings.iterations} iterations", title_justify="left")
    table.add_column("")
    for name in (*RUNS, "difference"):
        table.add_column(name, justify="right")

    def row(title: str, old: float, new: float, digits: int) -> None:
        table.add_row(title, f"{old:.{digits}f}", f"{new:.{digits}f}", f"{relative(new, old):+.2%}")

    def ends(title: str, old: Curve, new: Curve) -> None:
        row(title, old.last, new.last, 4)

    vanilla, compressed = outcome.vanilla, outcome.compressed
    ends("final training loss", vanilla.training, compressed.training)
    ends("final validation loss", vanilla.validation, compressed.validation)
    row("seconds per iteration (median)", vanilla.median_seconds, compressed.median_seconds, 3)
    return table


def _traffic_table(outcome: Outcome) -> Table:
    table = Table(title="Traffic per iteration, all ranks", title_justify="left")
    table.add_column("")
    for name in ("raw MB", "sent MB", "sent / raw"):
        table.add_column(name, justify="right")
    *classes, everything = shares(outcome.compressed)
    for share in classes:
        table.add_row(share.name, *_traffic_cells(share))
    table.add_section()
    table.add_row(everything.name, *_traffic_cells(everything), style="bold")
    return table


def _traffic_cells(share: Share) -> tuple[str, str, str]:
    return f"{share.raw / 1e6:.3f}", f"{share.sent / 1e6:.3f}", f"{share.ratio:.1%}"
