"""What Megatron and our hook wrote for TensorBoard, as plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from optimus_cc_ext.quickstart.settings import QuickstartError
from optimus_cc_ext.traffic import TrafficClass

__all__ = ["Curve", "Record", "TrafficCurves", "read_record"]


@dataclass(frozen=True)
class Curve:
    """A scalar over training: `values[i]` was written at iteration `iterations[i]`."""

    iterations: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        """The value at the end of training."""
        return self.values[-1]


@dataclass(frozen=True)
class TrafficCurves:
    """Bytes of one class in each iteration, of all ranks together."""

    raw: Curve
    sent: Curve

    @property
    def raw_per_iteration(self) -> float:
        """Mean bytes that vanilla Megatron would have sent."""
        return sum(self.raw.values) / len(self.raw.values)

    @property
    def sent_per_iteration(self) -> float:
        """Mean bytes that were sent."""
        return sum(self.sent.values) / len(self.sent.values)


@dataclass(frozen=True)
class Record:
    """Everything that the report needs of one run. Losses in nats per token, seconds per iteration."""

    training: Curve
    validation: Curve
    seconds: Curve
    traffic: dict[TrafficClass, TrafficCurves]

    @property
    def median_seconds(self) -> float:
        """Seconds of a typical iteration; Megatron does not log those of the first one."""
        return median(self.seconds.values)


def read_record(folder: Path) -> Record:
    """Read the event files in `folder`. Scalars are float32 there: whole bytes are exact up to 16.7 MB.

    Raises:
        QuickstartError: a scalar is missing, such as after a run that wrote nothing.
    """
    # Here, not above: it takes a second, and --help and bad input need not wait for it.
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    accumulator.Reload()
    known = set(accumulator.Tags()[SCALARS])

    def curve(tag: str) -> Curve:
        if tag not in known:
            raise QuickstartError(
                f"{folder}: no scalar '{tag}' in the TensorBoard events (there: {_some(sorted(known))})."
                " Look into the run's log"
            )
        # After training Megatron validates once more, at the same iteration on other text, and exits without a flush:
        # the event file may or may not have it. The validation within training is always there.
        points = {event.step: event.value for event in reversed(accumulator.Scalars(tag))}
        return Curve(tuple(sorted(points)), tuple(points[step] for step in sorted(points)))

    return Record(
        training=curve("lm loss"),
        validation=curve("lm loss validation"),
        seconds=curve("iteration-time"),
        traffic={
            traffic_class: TrafficCurves(
                raw=curve(f"optimus-cc/{traffic_class.value} raw bytes"),
                sent=curve(f"optimus-cc/{traffic_class.value} sent bytes"),
            )
            for traffic_class in TrafficClass
        },
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "none"
