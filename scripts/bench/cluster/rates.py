"""Rate of the links in each iteration of a run.

A rate is set when the log line of an iteration appears. The next iteration has begun by then, and so has no single
rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.hosts.network import UNSHAPED

_TRIAL = 14
"""Largest number of iterations that a trial takes, if no iteration is skipped."""


@dataclass
class Plan:
    """Plan of a run's rates."""

    rates: list[str]
    """Rate of each iteration of the run."""

    warm_up: int
    """Number of iterations at the beginning that are not measured."""

    def after(self, iteration: int) -> str:
        """Return the rate that the links get after iteration `iteration` (the first is 1)."""
        return self.rates[min(iteration, len(self.rates) - 1)]


def rate_list(rates: Sequence[str], *, each: int, cycles: int, warm_up: int) -> list[str]:
    """Return the rate of each iteration of a run: rate after rate, one iteration that is not measured and `each` that
    are.

    Every other cycle goes backwards, so that a drift of the machine's speed affects all rates alike.
    """
    listed = [UNSHAPED] * warm_up
    for cycle in range(cycles):
        for rate in rates if cycle % 2 == 0 else reversed(rates):
            # The first iteration after a switch of the rate is not measured.
            switched = not listed or listed[-1] != rate
            listed += [rate] * (each + switched)
    return listed


def plans(rates: Sequence[str], *, chooses: bool, each: int, cycles: int, warm_up: int) -> list[Plan]:
    """Return the plans of the runs that measure one variant: a single run for all rates, unless the variant `chooses`
    by the links.

    A variant that chooses at the start of a run, by a trial, must see the rate at which it is measured: it gets a run
    for each rate, with as many measured iterations after the trial.
    """
    if not chooses:
        return [Plan(rate_list(rates, each=each, cycles=cycles, warm_up=warm_up), warm_up)]
    warm_up = max(warm_up, _TRIAL)
    return [Plan([rate] * (warm_up + each * cycles), warm_up) for rate in rates]
