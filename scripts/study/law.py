"""The price of coded gradients as a law, as it was fixed before the first run.

    price = S ln(1 + e2)        S = - dL / d ln B, L vanilla's loss after equal steps with batches of B sequences

An error of the gradients' sum that has e2 times the sum's energy acts as the noise of a smaller batch. The rivals are
`noise`, with the error's energy over that of the gradients' own noise in place of e2, and `steps`, half S_T e2, where
S_T = - dL / d ln T is the slope in steps at equal batches, each with a schedule of its own. The null says 5 % of e2.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
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


def by_noise(slope: float, energy: float, noise: float) -> float:
    """Return the price by the rival `noise`: the error's energy counts against that of the gradients' own noise.

    Args:
        noise: the part of the sum's energy that is noise, which changes from batch to batch.
    """
    return slope * math.log1p(energy / noise)


def by_steps(slope_in_steps: float, energy: float) -> float:
    """Return the price by the rival `steps`."""
    return slope_in_steps * energy / 2


def holds(predicted: float, measured: Estimate) -> bool:
    """Return whether a prediction is within a factor of 1.5 of the measured mean, or inside its interval."""
    low, high = measured.ends
    return measured.mean / 1.5 <= predicted <= measured.mean * 1.5 or low <= predicted <= high
