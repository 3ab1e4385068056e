"""Rate of the links in each iteration of a run: a list made before, or a search that follows the measured seconds.

A rate is set when the log line of an iteration appears. The next iteration has begun by then, and so has no single
rate.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.hosts.network import UNSHAPED, bits_per_second


@dataclass
class Plan:
    """Plan of a run's rates, which is asked after each iteration."""

    rates: list[str]
    """Rate of each iteration of the run."""

    warm_up: int
    """Number of iterations at the beginning that are not measured."""

    def after(self, iteration: int, seconds: float, *, measured: bool) -> str:
        """Return the rate that the links get after iteration `iteration` (the first is 1)."""
        del seconds, measured
        return self.rates[min(iteration, len(self.rates) - 1)]


def rate_list(rates: Sequence[str], *, each: int, cycles: int, warm_up: int, initial: str = UNSHAPED) -> list[str]:
    """Return the rate of each iteration of a run: rate after rate, one iteration that is not measured and `each` that
    are.

    Every other cycle goes backwards, so that a drift of the machine's speed affects all rates alike.
    """
    listed = [initial] * warm_up
    for cycle in range(cycles):
        for rate in rates if cycle % 2 == 0 else reversed(rates):
            # The first iteration after a switch of the rate is not measured.
            switched = not listed or listed[-1] != rate
            listed += [rate] * (each + switched)
    return listed


def plans(rates: Sequence[str], *, chooses: bool, each: int, cycles: int, warm_up: int) -> list[Plan]:
    """Return the plans of the runs that measure one variant: a single run for all rates, unless the variant `chooses`
    by the links.

    A variant that chooses at the start of a run (`--dp-compression-stages auto`) must see the rate at which it is
    measured: it gets a run for each rate, with as many measured iterations.
    """
    if not chooses:
        return [Plan(rate_list(rates, each=each, cycles=cycles, warm_up=warm_up), warm_up)]
    return [Plan([rate] * (warm_up + each * cycles), warm_up) for rate in rates]


def next_guess(bits: float, seconds: float, unshaped: float) -> float:
    """Return the rate at which `unshaped` seconds would be exposed, from the seconds of an iteration at `bits` per
    second.

    Exposed time is taken to be inverse to the rate, which is true if the links never idle. A step is at most fourfold,
    because the quotient is noise if almost nothing is exposed.
    """
    exposed = max(seconds - unshaped, 0.0)
    return bits * min(max(exposed / unshaped, 0.25), 4.0)


@dataclass
class FindRate(Plan):
    """Search for the rate at which an iteration takes twice its unshaped time, so that half of it is exposed
    communication.

    Unshaped links come first and last, so that a disturbance of the machine at the beginning does not set the target.
    """

    start: str
    each: int
    steps: int = 4
    rates: list[str] = field(init=False)
    tried: list[tuple[str, float]] = field(default_factory=list)
    """Rates and median seconds, in the order in which they were tried."""

    def __post_init__(self) -> None:
        self.rates = [UNSHAPED] * (self.warm_up + self.each + (self.steps + 1) * (self.each + 1))
        self._rate = UNSHAPED
        self._now: list[float] = []
        self._unshaped: list[float] = []

    def after(self, iteration: int, seconds: float, *, measured: bool) -> str:
        if measured:
            self._now.append(seconds)
            self._unshaped += [seconds] * (self._rate == UNSHAPED)
        if len(self._now) == self.each:
            self.tried.append((self._rate, statistics.median(self._now)))
            self._now.clear()
            self._rate = self._next()
        return self._rate

    @property
    def unshaped(self) -> float:
        """Seconds of an iteration on unshaped links: the median of all iterations measured so far."""
        return statistics.median(self._unshaped)

    @property
    def best(self) -> tuple[str, float]:
        """Rate, among those tried, whose seconds came nearest to twice the unshaped seconds, and these seconds."""
        shaped = [each for each in self.tried if each[0] != UNSHAPED]
        return min(shaped, key=lambda each: abs(each[1] / self.unshaped - 2))

    def _next(self) -> str:
        if len(self.tried) == 1:
            return self.start
        if len(self.tried) > self.steps:
            return UNSHAPED
        rate, seconds = self.tried[-1]
        bits = next_guess(bits_per_second(rate), seconds, self.unshaped)
        return f"{max(bits, 1e6) / 1e6:.1f}mbit"
