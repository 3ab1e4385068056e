"""The price of coded gradients as a law, as it was fixed before the first run.

    price = S ln(1 + e2)        S = - dL / d ln B, L vanilla's loss after equal steps with batches of B sequences

An error of the gradients' sum that has e2 times the sum's energy acts as the noise of a smaller batch. The rivals are
`noise`, with the error's energy over that of the gradients' own noise in place of e2, and `steps`, half S_T e2, where
S_T = - dL / d ln T is the slope in steps at equal batches, each with a schedule of its own. The null says 5 % of e2.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from scripts.study.cells import student

HALF, DOUBLE, FEWER, NESTED = "half-batch", "double-batch", "fewer-steps", "vanilla-nested"
SLOPES: Mapping[str, tuple[Fraction, Fraction]] = {
    NESTED: (Fraction(1), Fraction(1)), HALF: (Fraction(1, 2), Fraction(1)),
    DOUBLE: (Fraction(2), Fraction(1)), FEWER: (Fraction(1), Fraction(7, 10)),
}  # fmt: skip
"""Sequences of a batch, and steps, over those of the study's training; the schedule is as long as the training."""

WINDOW = 2
"""Sequences that each step of every training may take, in batches of the study: those of the largest batch."""

SHAPED = 0.7
"""Standard deviation of the random weights by which the control `dp-shaped` multiplies each replica's gradients. The
error of their sum has the covariance of the gradients' own noise, and SHAPED^2 times its energy.
"""

NULL = 5.0
"""Price in percent over e2 of the law that knows no slope."""


@dataclass(frozen=True)
class Estimate:
    """Mean of a number's values over seeds, and the half width of its 95 % interval; NaN with one seed."""

    mean: float
    within: float
    seeds: int

    @staticmethod
    def of(values: Sequence[float]) -> "Estimate":
        """Estimate the mean of these values by Student's t distribution."""
        seeds = len(values)
        deviation = statistics.stdev(values) if seeds > 1 else math.nan
        width = student(seeds - 1, tail=0.025) * deviation / math.sqrt(seeds) if seeds > 1 else math.nan
        return Estimate(statistics.fmean(values), width, seeds)

    @property
    def ends(self) -> tuple[float, float]:
        """Lower and upper end of the interval."""
        return self.mean - self.within, self.mean + self.within

    @property
    def errors(self) -> float:
        """The mean over its standard error; NaN with one seed."""
        return self.mean / self.within * student(self.seeds - 1, tail=0.025) if self.seeds > 1 else math.nan


def slope_in_batch(half: float, double: float, nested: float) -> float:
    """Return S in percent of vanilla's loss, from one seed's losses with half the batch, the double, and the batch."""
    return 100 * (half - double) / (2 * math.log(2) * nested)


def slope_in_steps(fewer: float, nested: float) -> float:
    """Return S_T in percent of vanilla's loss, from one seed's losses with fewer steps, and with all."""
    return 100 * (fewer - nested) / (-math.log(SLOPES[FEWER][1]) * nested)


def price(slope: float, energy: float) -> float:
    """Return the increase of the loss that the law predicts, in percent of vanilla's loss.

    Args:
        slope: S, in percent.
        energy: e2, the relative energy of the error of the replicas' sum.
    """
    return slope * math.log1p(energy)


@dataclass(frozen=True)
class Known:
    """Inputs of the laws: the slopes of a cell, and the error of a format in it. None needs a compressed run."""

    batch: float
    """S, in percent."""

    steps: float | None
    """S_T, in percent; None if no run has fewer steps."""

    energy: float
    """e2, the relative energy of the error of the replicas' sum."""

    noise: float
    """Part of the sum's energy that is noise, which changes from batch to batch."""


LAWS: Mapping[str, Callable[[Known], float | None]] = {
    "law": lambda known: price(known.batch, known.energy),
    "noise": lambda known: price(known.batch, known.energy / known.noise) if known.noise > 0 else None,
    "steps": lambda known: known.steps and known.steps * known.energy / 2,
    "null": lambda known: NULL * known.energy,
    # Mutations: were the law right by chance, one of these would do as well.
    "a message's energy": lambda known: price(known.batch, 2 * known.energy),
    "slope in steps": lambda known: known.steps and price(known.steps, known.energy),
}
"""The law, its rivals and its mutations: price in percent. One of two replicas keeps its own part of the sum exact, so
that the error of a message has twice the relative energy of the sum's.
"""


@dataclass(frozen=True)
class Line:
    """Slopes of models that differ in their width alone, as a straight line in the width's logarithm."""

    points: Sequence[tuple[float, float]]
    """Pairs of a width and a slope, one for each seed of each model."""

    @property
    def known(self) -> bool:
        """True if there are enough points for a line with an interval."""
        return len(self.points) > 2 and len({width for width, _ in self.points}) > 1

    @property
    def source(self) -> str:
        """The number of models through which the line goes, in words."""
        return f"{len({width for width, _ in self.points})} models"

    def at(self, width: float) -> Estimate:
        """Return the slope at this width by least squares, with the 95 % confidence interval of the line there."""
        known, slopes = [math.log(each) for each, _ in self.points], [slope for _, slope in self.points]
        rise, start = statistics.linear_regression(known, slopes)
        freedom, middle = len(slopes) - 2, statistics.fmean(known)
        left = sum((slope - start - rise * each) ** 2 for each, slope in zip(known, slopes, strict=True)) / freedom
        spread = sum((each - middle) ** 2 for each in known)
        error = math.sqrt(left * (1 / len(slopes) + (math.log(width) - middle) ** 2 / spread))
        return Estimate(start + rise * math.log(width), student(freedom, tail=0.025) * error, len(slopes))


def near(predicted: float, measured: Estimate) -> bool:
    """Return whether a prediction is within a factor of 1.5 of the measured mean."""
    return measured.mean / 1.5 <= predicted <= measured.mean * 1.5


def holds(predicted: float, measured: Estimate) -> bool:
    """Return whether a prediction is near the measured mean, or inside the measured interval."""
    low, high = measured.ends
    return near(predicted, measured) or low <= predicted <= high
