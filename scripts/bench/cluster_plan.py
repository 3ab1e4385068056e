"""Which rate the links have in which iteration of a run: a list made before, or a search that goes by what it sees.

A rate is set when the log line of an iteration appears; by then the next iteration has begun, which therefore belongs
to no rate.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster_network import UNSHAPED, bits_per_second

__all__ = ["FindRate", "Plan", "Sweep", "next_guess", "plans", "rate_list"]


class Plan(Protocol):
    """What a run asks after each iteration."""

    warm_up: int
    """Iterations at the beginning that are not measured."""

    initial: str
    """The rate from before the run starts until its warm-up is over."""

    @property
    def iterations(self) -> int:
        """Of the whole run."""
        ...

    def after(self, iteration: int, seconds: float, *, measured: bool) -> str:
        """The rate that the links get now, after iteration `iteration` (the first is 1)."""
        ...


def rate_list(
    rates: Sequence[str], *, each: int, cycles: int, warm_up: int, initial: str = UNSHAPED
) -> list[str]:  # fmt: skip
    """The rate of each iteration of a run: `each` measured ones and a first that is not, rate after rate.

    Every other cycle goes backwards, so that a drift of the machine's speed weighs on all rates alike.
    """
    ordered: list[str] = []
    for cycle in range(cycles):
        ordered += rates if cycle % 2 == 0 else reversed(rates)
    segments: list[str] = [initial] * warm_up
    for rate in ordered:
        # No iteration is lost where the rate stays.
        switched = not segments or segments[-1] != rate
        segments += [rate] * (each + switched)
    return segments


@dataclass
class Sweep:
    """All `rates` in turn, `cycles` times."""

    rates: Sequence[str]
    each: int
    """Measured iterations at a rate in a cycle."""

    cycles: int = 2
    warm_up: int = 3
    initial: str = UNSHAPED
    _list: list[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._list = rate_list(
            self.rates, each=self.each, cycles=self.cycles, warm_up=self.warm_up, initial=self.initial
        )

    @property
    def iterations(self) -> int:
        return len(self._list)

    def after(self, iteration: int, seconds: float, *, measured: bool) -> str:
        del seconds, measured
        return self._list[min(iteration, len(self._list) - 1)]


def plans(
    rates: Sequence[str], *, chooses: bool, each: int, cycles: int, warm_up: int
) -> list[Sweep]:  # fmt: skip
    """The runs that measure one variant: a single one for all rates, unless it `chooses` by the links.

    What chooses at the start of a run (`--dp-compression-stages auto`) has to find the rate that it is measured at:
    it gets a run for each rate, with as many measured iterations.
    """
    if chooses:
        return [Sweep([rate], each=each * cycles, cycles=1, warm_up=warm_up, initial=rate) for rate in rates]
    return [Sweep(rates, each=each, cycles=cycles, warm_up=warm_up)]


def next_guess(bits: float, seconds: float, unshaped: float) -> float:
    """The rate at which `unshaped` seconds would be exposed, from the time at `bits` per second.

    Exposed time is taken for inverse to the rate, which it is where the links never idle. A step is at most fourfold:
    where almost nothing is exposed, the quotient is noise.
    """
    exposed = max(seconds - unshaped, 0.0)
    return bits * min(max(exposed / unshaped, 0.25), 4.0)


@dataclass
class FindRate:
    """Searches the rate at which an iteration takes twice its unshaped time: half of it is exposed communication.

    Unshaped links come first and last, so that a machine that was disturbed at the beginning does not set the aim.
    """

    start: str
    each: int
    steps: int = 4
    warm_up: int = 3
    initial: str = UNSHAPED
    tried: list[tuple[str, float]] = field(default_factory=list)
    """Rate and median seconds, in the order in which they were tried."""

    _seconds: list[float] = field(default_factory=list, repr=False)
    _unshaped: list[float] = field(default_factory=list, repr=False)
    _rate: str = field(default=UNSHAPED, repr=False)

    @property
    def iterations(self) -> int:
        return self.warm_up + self.each + (self.steps + 1) * (self.each + 1)

    def after(self, iteration: int, seconds: float, *, measured: bool) -> str:
        if measured:
            self._seconds.append(seconds)
            if self._rate == UNSHAPED:
                self._unshaped.append(seconds)
        if len(self._seconds) == self.each:
            self.tried.append((self._rate, statistics.median(self._seconds)))
            self._seconds.clear()
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
