"""Says when compression's error leaves the range that it had, and which flag turns that class dense."""

from collections.abc import Iterator
from math import isfinite

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.metrics.report import Report

__all__ = ["ErrorAlarm"]

FACTOR = 3.0
"""How far above its running mean an error may be."""

_WEIGHT = 0.1
"""Of a report in the running mean."""


class ErrorAlarm:
    """Running means of relative errors, by technique, of this process."""

    def __init__(self) -> None:
        self._usual: dict[str, float] = {}

    def lines(self, report: Report) -> Iterator[str]:
        """For the terminal: one per technique whose error is NaN or infinite, or `FACTOR` times what it usually is."""
        errors = report.errors()
        for traffic in CLASSES:
            if (title := traffic.title) not in errors:
                continue
            error, usual = errors[title], self._usual.get(title, errors[title])
            if isfinite(error) and error <= FACTOR * usual:
                self._usual[title] = usual + _WEIGHT * (error - usual)
                continue
            than = f", usually {100 * usual:.2f} %" if isfinite(usual) else ""
            yield (
                f"warning | {title}: error {100 * error:.2f} %{than}. If that stays so: {traffic.format_flag} dense "
                "turns it dense on resume, and nothing is lost"
            )
