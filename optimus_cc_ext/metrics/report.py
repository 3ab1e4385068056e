"""What is reported at the logging interval: traffic, errors, residuals and time, of all stages together.

Each rank contributes one row of sums to a table of stages, one all-reduce adds the tables up, and every rank reads
the same report from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from math import sqrt

import torch

from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config.classes import CLASSES, TrafficClass
from optimus_cc_ext.metrics.error_statistics import StatisticsSums
from optimus_cc_ext.metrics.gauge import norm
from optimus_cc_ext.session import Session

__all__ = ["Report", "StageMetrics", "TechniqueMetrics", "collect"]


@dataclass(frozen=True)
class TechniqueMetrics:
    """One technique on the ranks of one stage, in the iteration that was measured."""

    error: float = 0.0
    """Sum over the ranks of |error|^2, Frobenius, in units of the scaled loss."""

    compressed: float = 0.0
    """The same of what was compressed: with low-rank, gradient plus residual."""

    residual: float = 0.0
    """The same of what is remembered, in units of the loss."""

    seconds: float = 0.0
    """Sum over the ranks of the time spent on compressing and decompressing."""

    @property
    def relative_error(self) -> float:
        """|error| / |what was compressed|."""
        return sqrt(self.error / self.compressed) if self.compressed else 0.0


@dataclass(frozen=True)
class StageMetrics:
    """Sums over the ranks of one stage."""

    ranks: int
    techniques: Mapping[str, TechniqueMetrics]
    """By title."""

    statistics: StatisticsSums


@dataclass(frozen=True)
class Report:
    """What every rank knows after `collect`."""

    traffic: dict[TrafficClass, tuple[float, float]]
    """(raw, sent) bytes per iteration by class, of all ranks."""

    stages: tuple[StageMetrics, ...]
    formats: Mapping[str, str] = field(default_factory=dict)
    """By title, of what is compressed."""

    def errors(self) -> dict[str, float]:
        """By title, the relative error over all stages, of what was compressed in the measured iteration."""
        sums = {
            traffic.title: [
                sum(getattr(stage.techniques[traffic.title], name) for stage in self.stages)
                for name in ("error", "compressed")
            ]
            for traffic in CLASSES
        }
        return {title: sqrt(error / of) for title, (error, of) in sums.items() if of != 0.0}

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        parts = [
            f"{traffic.tag}: {sent / 1e6:.3f} of {raw / 1e6:.3f} MB ({100 * sent / raw:.1f} %)"
            for traffic, (raw, sent) in self.traffic.items()
            if raw
        ]
        yield f"traffic per iteration | {' | '.join(parts) or 'none'}"
        parts = [self._technique(title, error) for title, error in self.errors().items()]
        if parts:
            yield f"compression | {' | '.join(parts)}"
        parts = [
            f"stage {stage}: cosine {s.cosine / s.pairs:+.4f}, mean error {s.error_mean / s.pairs:+.2e}, "
            f"mean activation difference {s.difference_mean / s.pairs:+.2e}"
            for stage, s in enumerate(stage.statistics for stage in self.stages)
            if s.pairs
        ]
        if parts:
            yield f"errors against activation differences | {' | '.join(parts)}"

    def scalars(self) -> dict[str, float]:
        """For TensorBoard and W&B, by name."""
        named: dict[str, float] = {}
        for traffic, (raw, sent) in self.traffic.items():
            named[f"{traffic.tag} raw bytes"] = raw
            named[f"{traffic.tag} sent bytes"] = sent
        for number, stage in enumerate(self.stages):
            for name, technique in stage.techniques.items():
                if technique.seconds:
                    named[f"{name} milliseconds/stage {number}"] = 1e3 * technique.seconds / stage.ranks
                if technique.compressed:
                    named[f"{name} relative error/stage {number}"] = technique.relative_error
                if technique.residual:
                    named[f"{name} residual norm/stage {number}"] = sqrt(technique.residual / stage.ranks)
            if pairs := stage.statistics.pairs:
                named[f"error cosine/stage {number}"] = stage.statistics.cosine / pairs
                named[f"error mean/stage {number}"] = stage.statistics.error_mean / pairs
                named[f"activation difference mean/stage {number}"] = stage.statistics.difference_mean / pairs
        return {f"optimus-cc/{name}": value for name, value in named.items()}

    def _technique(self, title: str, error: float) -> str:
        """One technique on all stages: its error over all of them, residual and time where they are largest."""
        measured = [(stage.ranks, stage.techniques[title]) for stage in self.stages]
        residual = max(sqrt(technique.residual / ranks) for ranks, technique in measured)
        milliseconds = max(1e3 * technique.seconds / ranks for ranks, technique in measured)
        remembered = f", residual norm {residual:.3e}" if residual else ""
        return f"{title} {self.formats[title]}: error {100 * error:.2f} %{remembered}, {milliseconds:.2f} ms"


def collect(session: Session, traffic: Sequence[int], iterations: int, device: torch.device) -> Report:
    """Add up what all ranks measured. Collective over all ranks of the model; reads from the device.

    Args:
        session: this rank's, placed in the grid.
        traffic: this rank's traffic since the last report, in the order of `Traffic.as_list`.
        iterations: how many iterations that covers.
        device: where collectives take their tensors.
    """
    assert session.grid is not None, "the session has no place in the grid yet"
    statistics = session.backprop.statistics.sums()
    row = [
        1.0,
        *(value for each in CLASSES for value in _sums(session, each.name)),
        *(statistics.pairs, statistics.cosine, statistics.error_mean, statistics.difference_mean),
        *traffic,
    ]
    table = torch.zeros(session.grid.stages, len(row), dtype=torch.float64)
    table[session.grid.place.stage] = torch.tensor(row, dtype=torch.float64)
    table = table.to(device)
    session.grid.sum(table)
    sums = [values / iterations for values in table[:, -len(traffic) :].sum(0).tolist()]
    return Report(
        dict(zip(CLASSES, zip(sums[::2], sums[1::2], strict=True), strict=True)),
        tuple(_stage(iter(values)) for values in table.tolist()),
        {each.title: session.config.format_of(each) for each in CLASSES},
    )


def _stage(row: Iterator[float]) -> StageMetrics:
    """Read a stage's sums from its row of the table, in the order in which `collect` wrote them."""
    ranks, width = int(next(row)), len(fields(TechniqueMetrics))
    techniques = {each.title: TechniqueMetrics(*islice(row, width)) for each in CLASSES}
    return StageMetrics(ranks, techniques, StatisticsSums(int(next(row)), *islice(row, 3)))


def _sums(session: Session, name: str) -> tuple[float, ...]:
    """The fields of `TechniqueMetrics`."""
    gauge, states = session.gauges.get(name), session.states.get(name)
    if gauge is None:
        return (0.0,) * len(fields(TechniqueMetrics))
    scratch = Scratch()
    norms = (float(norm(residual, scratch)) for residual in (states.residuals() if states else ()))
    residual = sum(norm**2 for norm in norms) / session.loss_scale**2
    return (*gauge.squares(), residual, gauge.seconds())
