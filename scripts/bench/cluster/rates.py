"""Which rate the links have in which iteration of a run: a list made before, or a search that goes by what it sees.

A rate is set when the log line of an iteration appears; by then the next iteration has begun, which therefore belongs
to no rate.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.hosts.network import UNSHAPED, bits_per_second


@dataclass
class Plan:
    """What a run asks after each iteration."""

    rates: list[str]
    """One for each iteration of the run."""

    warm_up: int
    """Iterations at the beginning that are not measured."""

    def after(self, iteration: int, seconds: float, *, measured: bool) -> str:
        """The rate that the links get now, after iteration `iteration` (the first is 1)."""
        del seconds, measured
        return self.rates[min(iteration, len(self.rates) - 1)]


def rate_list(rates: Sequence[str], *, each: int, cycles: int, warm_up: int, initial: str = UNSHAPED) -> list[str]:
    """The rate of each iteration of a run: `each` measured ones and a first that is not, rate after rate.

    Every other cycle goes backwards, so that a drift of the machine's speed weighs on all rates alike.
    """
    listed = [initial] * warm_up
    for cycle in range(cycles):
        for rate in rates if cycle % 2 == 0 else reversed(rates):
            switched = not listed or listed[-1] != rate  # no iteration is lost where the rate stays
            listed += [rate] * (each + switched)
    return listed


def plans(rates: Sequence[str], *, chooses: bool, each: int, cycles: int, warm_up: int) -> list[Plan]:
    """The runs that measure one variant: a single one for all rates, unless it `chooses` by the links.

    What chooses at the start of a run (`--dp-compression-stages auto`) has to find the rate that it is measured at:
    it gets a run for each rate, with as many measured iterations.
    """
    if not chooses:
        return [Plan(rate_list(rates, each=each, cycles=cycles, warm_up=warm_up), warm_up)]
    return [Plan([rate] * (warm_up + each * cycles), warm_up) for rate in rates]


def next_guess(bits: float, seconds: float, unshaped: float) -> float:
    """The rate at which `unshaped` seconds would be exposed, from the time at `bits` per second.

    Exposed time is taken for inverse to the rate, which it is where the links never idle. A step is at most fourfold:
    where almost nothing is exposed, the quotient is noise.
    """
    exposed = max(seconds - unshaped, 0.0)
    return bits * min(max(exposed / unshaped, 0.25), 4.0)


@dataclass
class FindRate(Plan):
    """Searches the rate at which an iteration takes twice its unshaped time: half of it is exposed communication.

    Unshaped links come first and last, so that a machine that was disturbed at the beginning does not set the aim.
    """

    start: str
    each: int
    steps: int = 4
    rates: list[str] = field(init=False)
    tried: list[tuple[str, float]] = field(default_factory=list)
    """Rate and median seconds, in the order in which they were tried."""

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
        """Seconds of an iteration on unshaped links: the median of all that were measured so far."""
        return statistics.median(self._unshaped)

    @property
    def best(self) -> tuple[str, float]:
        """The rate tried, and its seconds, that came nearest to twice the unshaped time."""
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
