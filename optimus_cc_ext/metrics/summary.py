"""Summary of a run: what compression did, in one line that a person can repeat to another."""

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from optimus_cc_ext.metrics.report import Report
from optimus_cc_ext.metrics.traffic import BETWEEN_NODES


class Compared(NamedTuple):
    """Median seconds of steps that a trial has compared."""

    name: str
    """Name of the compressed configuration, such as a preset."""

    dense: float
    compressed: float
    stays: bool
    """True if the trial chose the compressed way."""


def in_words(raw: float, sent: float) -> str:
    """Return the bytes that were sent in words, as a share of the raw ones."""
    return f"{sent / 1e6:.1f} of {raw / 1e6:.1f} MB" + (f" ({100 * sent / raw:.1f} %)" if raw else "")


@dataclass
class Summary:
    """Sums over the reports of a run."""

    _iterations: int = 0
    _memory: int = 0
    _seconds: list[float] = field(default_factory=list)
    _bytes: dict[str, list[float]] = field(default_factory=lambda: {"": [0.0, 0.0], BETWEEN_NODES: [0.0, 0.0]})
    """(raw, sent) bytes of all iterations: of all classes, and of what left a node."""

    def add(self, report: Report, iterations: int) -> None:
        """Add the report of some iterations."""
        self._iterations += iterations
        self._memory = max(self._memory, report.memory)
        self._seconds.append(report.seconds["iteration"])
        for name, both in [*(("", both) for both in report.traffic.values()), (BETWEEN_NODES, report.leaving)]:
            for side, nbytes in enumerate(both):
                self._bytes[name][side] += nbytes * iterations

    def line(self, compared: Compared | None) -> str:
        """Return the line; `compared` is None if this run has had no trial."""
        n, took, against = self._iterations, median(self._seconds), ""
        if compared is not None and compared.stays:
            saved = 100 * (1 - took / compared.dense)
            against = f", {saved:.0f} % less than {compared.dense:.3g} s dense in the trial"
        elif compared is not None:
            against = (
                f", dense since the trial, in which {compared.name} took {compared.compressed:.3g} s, and dense "
                f"{compared.dense:.3g} s"
            )
        sent, leaving = (in_words(raw / n, sent / n) for raw, sent in self._bytes.values())
        return (
            f"{n} iterations: {took:.3g} s each{against}; {sent} sent in each"
            f"{f', {leaving} {BETWEEN_NODES}' if self._bytes[BETWEEN_NODES][0] else ''}; "
            f"up to {self._memory / 1e6:.1f} MB of memory on a rank"
        )
