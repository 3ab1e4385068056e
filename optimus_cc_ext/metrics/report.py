"""The report at each logging interval: traffic, errors, residual norms and times of all stages.

Each rank fills its stage's row of a table with sums. One all-reduce adds the tables up, and every rank reads the same
report from the result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import islice
from math import isfinite, sqrt
from typing import Self

import torch

from optimus_cc_ext.compressors.formats import EXACT
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config.classes import CLASSES, PARAM_GATHER, TrafficClass
from optimus_cc_ext.metrics.error_statistics import StatisticsSums
from optimus_cc_ext.metrics.gauge import Gauge, norm
from optimus_cc_ext.metrics.traffic import BETWEEN_NODES

FACTOR = 3.0
"""Ratio of an error to its running mean above which `ErrorAlarm` warns."""

_WEIGHT = 0.1
"""Weight of one report in the running mean of errors."""


@dataclass(frozen=True)
class TechniqueMetrics:
    """Sums of one technique over the ranks of one stage, in the measured iteration."""

    error: float = 0.0
    """Sum over the ranks of |error|^2 (Frobenius), in units of the scaled loss."""

    compressed: float = 0.0
    """Sum over the ranks of |compressed tensor|^2, in units of the scaled loss; for low-rank it is gradient plus
    residual.
    """

    residual: float = 0.0
    """Sum over the ranks of |residual|^2, in units of the loss."""

    seconds: float = 0.0
    """Sum over the ranks of the seconds spent on compressing and decompressing."""

    @property
    def relative_error(self) -> float:
        return sqrt(self.error / self.compressed) if self.compressed else 0.0


@dataclass(frozen=True)
class StageMetrics:
    """Sums of measurements over the ranks of one stage."""

    ranks: int
    techniques: Mapping[str, TechniqueMetrics]
    """The metrics of each technique, by the tag of its class of traffic."""

    statistics: StatisticsSums

    def as_list(self) -> list[float]:
        """Return the sums as a list of numbers, which ranks add up and `from_list` reads."""
        techniques = (value for each in CLASSES for value in astuple(self.techniques[each.tag]))
        return [self.ranks, *techniques, *astuple(self.statistics)]

    @classmethod
    def from_list(cls, values: Iterable[float]) -> Self:
        """Read sums, as `as_list` returns them, from the beginning of `values`."""
        row = iter(values)
        ranks, width = int(next(row)), len(fields(TechniqueMetrics))
        techniques = {each.tag: TechniqueMetrics(*islice(row, width)) for each in CLASSES}
        return cls(ranks, techniques, StatisticsSums(int(next(row)), *islice(row, len(fields(StatisticsSums)) - 1)))


@dataclass(frozen=True)
class Report:
    """The report that every rank has after `collect`."""

    traffic: dict[TrafficClass, tuple[float, float]]
    """(raw, sent) bytes per iteration of each class, summed over all ranks."""

    stages: tuple[StageMetrics, ...]
    formats: Mapping[str, str] = field(default_factory=dict)
    """The wire format of each compressed class, by its tag."""

    leaving: tuple[float, float] = (0.0, 0.0)
    """(raw, sent) bytes per iteration that leave a node, summed over all ranks; zeros if nodes are not known."""

    fallback: str | None = None
    """The reason why torch compresses in place of Triton's kernels."""

    memory: int = 0
    """Memory that compression takes, in bytes, on the rank with the most of it; 0 if unknown."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of an iteration, by what they are."""

    def errors(self) -> dict[str, float]:
        """Return the relative error over all stages in the measured iteration, by the tag of each
        compressed class.
        """
        sums = {
            traffic.tag: [
                sum(getattr(stage.techniques[traffic.tag], name) for stage in self.stages)
                for name in ("error", "compressed")
            ]
            for traffic in CLASSES
        }
        return {tag: sqrt(error / compressed) for tag, (error, compressed) in sums.items() if compressed != 0.0}

    def lines(self) -> Iterator[str]:
        """Yield the log lines of the report: traffic, then errors and times of each technique."""
        parts = [
            f"{name}: {sent / 1e6:.3f} of {raw / 1e6:.3f} MB ({100 * sent / raw:.1f} %)"
            for name, (raw, sent) in self._bytes()
            if raw
        ]
        yield f"traffic per iteration | {' | '.join(parts) or 'none'}"
        parts = [self._technique(tag, error) for tag, error in self.errors().items()]
        if parts:
            yield f"compression | {' | '.join(parts)}"
        if self.fallback is not None:
            yield f"compressed by torch | {self.fallback}"
        parts = [
            f"stage {stage}: cosine {s.cosine / s.pairs:+.4f}, mean error {s.error_mean / s.pairs:+.2e}, "
            f"mean activation difference {s.difference_mean / s.pairs:+.2e}"
            for stage, s in enumerate(stage.statistics for stage in self.stages)
            if s.pairs
        ]
        if parts:
            yield f"errors against activation differences | {' | '.join(parts)}"

    def scalars(self) -> dict[str, float]:
        """Return the scalars for TensorBoard and W&B, by tag."""
        named = {f"{name} seconds": value for name, value in self.seconds.items()}
        if self.memory:
            named["memory bytes"] = self.memory
        for name, (raw, sent) in self._bytes():
            named[f"{name} raw bytes"] = raw
            named[f"{name} sent bytes"] = sent
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

    def _bytes(self) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield (raw, sent) bytes per iteration of each class, then those of all classes that leave a node."""
        for traffic, both in self.traffic.items():
            yield traffic.tag, both
        if any(self.leaving):
            yield BETWEEN_NODES, self.leaving

    def _technique(self, tag: str, error: float) -> str:
        """Return one technique's part of a log line: its error over all stages, and the largest residual norm and time
        of a stage.
        """
        measured = [(stage.ranks, stage.techniques[tag]) for stage in self.stages]
        residual = max(sqrt(technique.residual / ranks) for ranks, technique in measured)
        milliseconds = max(1e3 * technique.seconds / ranks for ranks, technique in measured)
        kept = f", residual norm {residual:.3e}" if residual else ""
        if self.formats[tag] == EXACT:
            raw, sent = next(both for traffic, both in self.traffic.items() if traffic.tag == tag)
            return f"{tag} {EXACT}: {16 * sent / max(raw, 1):.2f} bits a value, {milliseconds:.2f} ms"
        share = " of a step's change, which the next step makes up" if tag == PARAM_GATHER.tag else ""
        return f"{tag} {self.formats[tag]}: error {100 * error:.2f} %{share}{kept}, {milliseconds:.2f} ms"


def collect(
    mine: StageMetrics, stage: int, stages: int, formats: Mapping[str, str], traffic: Sequence[int], iterations: int,
    add_up: Callable[[torch.Tensor], None], device: torch.device,
) -> Report:  # fmt: skip
    """Add up the measurements of all ranks. Collective over all ranks of the model; waits for the device.

    Args:
        mine: the measurements of this rank.
        stage: this rank's pipeline stage.
        stages: the number of pipeline stages.
        formats: the wire format of each class of traffic, by tag.
        traffic: this rank's bytes since the last report, in the order of `Traffic.as_list`.
        iterations: the number of iterations since the last report.
        add_up: sums a tensor over all ranks of the model, in place.
        device: the device of the tensors that `add_up` takes.
    """
    row = [*mine.as_list(), *traffic]
    table = torch.zeros(stages, len(row), dtype=torch.float64)
    table[stage] = torch.tensor(row, dtype=torch.float64)
    table = table.to(device)
    add_up(table)
    sums = [values / iterations for values in table[:, -len(traffic) :].sum(0).tolist()]
    both = list(zip(sums[::2], sums[1::2], strict=True))
    return Report(
        dict(zip(CLASSES, both[:-1], strict=True)),
        tuple(StageMetrics.from_list(values) for values in table.tolist()),
        formats,
        both[-1],
    )


def technique_metrics(gauge: Gauge, residuals: Iterable[torch.Tensor], loss_scale: float) -> TechniqueMetrics:
    """Return the measurements of one technique on this rank; waits for the device.

    Args:
        residuals: all residuals that the technique keeps on this rank, in units of the loss multiplied by `loss_scale`.
    """
    scratch = Scratch()
    residual = sum(float(norm(tensor, scratch)) ** 2 for tensor in residuals) / loss_scale**2
    error, compressed = gauge.squares()
    return TechniqueMetrics(error, compressed, residual, gauge.seconds())


class ErrorAlarm:
    """An alarm for compression errors that leave their usual range, with running means by technique.

    Its warning names the flag that makes the class of traffic dense.
    """

    def __init__(self) -> None:
        self._usual: dict[str, float] = {}

    def lines(self, report: Report) -> Iterator[str]:
        """Yield a warning for each technique whose error is NaN, infinite, or more than `FACTOR` times its running
        mean.
        """
        errors = report.errors()
        for traffic in CLASSES:
            if (tag := traffic.tag) not in errors:
                continue
            error, usual = errors[tag], self._usual.get(tag, errors[tag])
            if isfinite(error) and error <= FACTOR * usual:
                self._usual[tag] = usual + _WEIGHT * (error - usual)
                continue
            than = f", usually {100 * usual:.2f} %" if isfinite(usual) else ""
            yield (
                f"warning | {tag}: compression error {100 * error:.2f} %{than}. If it stays high, resume from a "
                f"checkpoint with {traffic.format_flag} dense: no training state is lost"
            )
