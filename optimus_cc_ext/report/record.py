"""What a run reported, as curves by TensorBoard's tags: read from its event files, or from what it printed."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import mean, median

from optimus_cc_ext.metrics.traffic import TrafficClass
from optimus_cc_ext.report import ReportError
from optimus_cc_ext.report.log_lines import parse_progress, parse_scalars

__all__ = ["SECONDS", "TRAINING", "VALIDATION", "Curve", "Record", "Share", "read_events", "read_logs", "shares"]

TRAINING, VALIDATION, SECONDS = "lm loss", "lm loss validation", "iteration-time"


@dataclass(frozen=True)
class Curve:
    """A scalar over training: `values[i]` belongs to iteration `iterations[i]`. What no value tells is NaN."""

    iterations: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        """The value at the end of training."""
        return self.values[-1] if self.values else nan

    @property
    def mean(self) -> float:
        """Over all iterations."""
        return mean(self.values) if self.values else nan

    @property
    def median(self) -> float:
        """Over all iterations but the first, which sets things up."""
        later = [value for iteration, value in zip(self.iterations, self.values, strict=True) if iteration > 1]
        return median(later) if later else nan


@dataclass(frozen=True)
class Record:
    """One run. Losses in nats per token, seconds per iteration; traffic in bytes per iteration, of all ranks."""

    source: Path
    scalars: dict[str, dict[int, float]]
    """Tag to the value at each iteration."""

    def curve(self, tag: str) -> Curve:
        """The scalar of this tag; empty if there is none."""
        points = sorted(self.scalars.get(tag, {}).items())
        return Curve(tuple(iteration for iteration, _ in points), tuple(value for _, value in points))

    def require(self, tags: Iterable[str]) -> None:
        """Raise ReportError if a scalar is missing, such as after a run that wrote nothing."""
        for tag in tags:
            if tag not in self.scalars:
                known = sorted(self.scalars)
                some = ", ".join(known[:5] + ["..."] * (len(known) > 5)) or "none"
                raise ReportError(f"{self.source}: no scalar '{tag}' (there: {some}). Look into the run's log")

    def largest(self, tag: str) -> float:
        """The largest value of this tag at any iteration, on any rank or stage (`tag/rank 0`, ...); NaN if none."""
        tags = [known for known in self.scalars if known == tag or known.startswith(f"{tag}/")]
        return max((value for known in tags for value in self.scalars[known].values()), default=nan)

    @property
    def training(self) -> Curve:
        """Losses of the training batches."""
        return self.curve(TRAINING)

    @property
    def validation(self) -> Curve:
        """Losses of the validations within training."""
        return self.curve(VALIDATION)

    @property
    def seconds(self) -> Curve:
        """Of each iteration; event files lack the first one's."""
        return self.curve(SECONDS)

    def sent(self, traffic_class: str) -> Curve:
        """Bytes that were sent."""
        return self.curve(f"optimus-cc/{traffic_class} sent bytes")

    def raw(self, traffic_class: str) -> Curve:
        """Bytes that vanilla Megatron sends."""
        return self.curve(f"optimus-cc/{traffic_class} raw bytes")


def read_events(folder: Path) -> Record:
    """Read the event files in `folder`. Scalars are float32 there: whole bytes are exact up to 16.7 MB."""
    # Here, not above: it takes a second, and bad input need not wait for it.
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    accumulator.Reload()
    # After training Megatron validates once more, at the same iteration on other text, and exits without a flush: the
    # event file may or may not have it. The validation within training is always there, and first.
    return Record(folder, {
        tag: dict(sorted({event.step: event.value for event in reversed(accumulator.Scalars(tag))}.items()))
        for tag in accumulator.Tags()[SCALARS]
    })  # fmt: skip


def read_logs(folder: Path) -> Record:
    """Read log*.txt in `folder`, the one written to last at the end. Of an iteration run twice, the later counts."""
    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    for log in sorted(folder.glob("log*.txt"), key=lambda path: path.stat().st_mtime):
        iteration = 0
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if progress := parse_progress(line):
                    if progress.seconds is not None:
                        iteration = progress.iteration
                        scalars[TRAINING][iteration], scalars[SECONDS][iteration] = progress.loss, progress.seconds
                    elif " on test set" not in line:
                        # After training Megatron validates once more, on other samples.
                        scalars[VALIDATION].setdefault(progress.iteration, progress.loss)
                for tag, value in parse_scalars(line).items():
                    scalars[tag][iteration] = value
    return Record(folder, dict(scalars))


@dataclass(frozen=True)
class Share:
    """Bytes of one traffic class in an iteration, of all ranks together."""

    name: str
    raw: float
    sent: float

    @property
    def ratio(self) -> float:
        """sent / raw; 1 where there is no such traffic."""
        return self.sent / self.raw if self.raw else 1.0


def shares(record: Record) -> list[Share]:
    """Mean raw and sent bytes per iteration of each class, then of all of them."""
    names = [traffic_class.value for traffic_class in TrafficClass]
    classes = [Share(name, record.raw(name).mean, record.sent(name).mean) for name in names]
    return [*classes, Share("all traffic", sum(s.raw for s in classes), sum(s.sent for s in classes))]
