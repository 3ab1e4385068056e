"""What a run reported, as curves by TensorBoard's tags: read from its event files, or from what it printed."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from statistics import mean, quantiles

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.report import ReportError
from optimus_cc_ext.report.log_lines import parse_progress, parse_scalars

__all__ = [
    "SECONDS", "TRAINING", "VALIDATION", "Curve", "Record", "Share", "read_events", "read_logs", "read_run", "shares",
]  # fmt: skip

_EVENTS = "events.out.tfevents.*"
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
        return self.between(2).quartiles[1]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The lower one, the median, the upper one."""
        if len(self.values) < 2:
            return (self.last,) * 3
        lower, middle, upper = quantiles(self.values, n=4, method="inclusive")
        return lower, middle, upper

    def between(self, first: int, last: float = inf) -> "Curve":
        """Iterations from `first` to `last`."""
        kept = [(i, value) for i, value in zip(self.iterations, self.values, strict=True) if first <= i <= last]
        return Curve(tuple(i for i, _ in kept), tuple(value for _, value in kept))


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


def read_run(folder: Path) -> Record:
    """Read event files, or, where there are none, the logs (log*.txt) that scripts/paper keeps; raises ReportError."""
    if next(folder.rglob(_EVENTS), None) is None and TRAINING in (record := read_logs(folder)).scalars:
        return record
    return read_events(folder)


def read_events(folder: Path) -> Record:
    """Read the event files of one run, in `folder` or in one folder below. Scalars are float32 there: whole bytes are
    exact up to 16.7 MB. Of an iteration run twice, as by a run that resumed, the later file counts.

    Raises:
        ReportError: no event files, those of several runs, or one that ends in the middle.
    """
    files = sorted(folder.rglob(_EVENTS), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ReportError(f"{folder}: no event files ({_EVENTS}). Train with --tensorboard-dir FOLDER")
    if others := {path.parent for path in files} - {files[0].parent}:
        raise ReportError(f"{folder}: event files of several runs, in {files[0].parent} and {min(others)}. Name one")
    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    earlier: tuple[Path, int] | None = None
    for file in files:
        found = _read_events(file)
        if not found:  # a run that ended before its first iteration
            continue
        begins = min(step for steps in found.values() for step in steps)
        if earlier and begins <= earlier[1]:
            raise ReportError(
                f"{file}: starts at iteration {begins}, and {earlier[0].name} at {earlier[1]}: these are two runs, as"
                " one that resumes starts later. Give each a folder"
            )
        earlier = file, begins
        for tag, values in found.items():
            scalars[tag] |= values
    if not scalars:
        raise ReportError(f"{files[0]}: no scalars. Did the run end before its first iteration? Look into its log")
    return Record(folder, {tag: dict(sorted(values.items())) for tag, values in scalars.items()})


def _read_events(file: Path) -> dict[str, dict[int, float]]:
    """Tag to the values of its scalars."""
    # Here, not above: it takes a second, and bad input need not wait for it.
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    loader = EventFileLoader(str(file))
    for event in loader.Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                # After training Megatron validates once more, at the same iteration on other text, and exits without a
                # flush: the file may or may not have it. The validation within training is always there, and first.
                scalars[value.tag].setdefault(event.step, float(make_ndarray(value.tensor).item()))
    if (read := _whole_records(file)) is not None:
        raise ReportError(f"{file}: ends in the middle of a record, at byte {read}: cut off, or not a copy to the end")
    return scalars


def _whole_records(file: Path) -> int | None:
    """Byte at which a record begins that is not there to its end; None if all are."""
    # Each is its length (8 bytes), a check of that (4), so many bytes, a check of these (4). TensorBoard reads what is
    # still being written, and hence takes half a record for the end.
    size, place = file.stat().st_size, 0
    with file.open("rb") as stream:
        while place < size:
            stream.seek(place)
            header = stream.read(8)
            following = place + 16 + int.from_bytes(header, "little")
            if len(header) < 8 or following > size:
                return place
            place = following
    return None


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
    """Mean raw and sent bytes per iteration of each class that there is, then of all of them."""
    names = [each.tag for each in CLASSES if record.raw(each.tag).mean > 0]  # NaN where nobody said it
    classes = [Share(name, record.raw(name).mean, record.sent(name).mean) for name in names]
    return [*classes, Share("all traffic", sum(s.raw for s in classes), sum(s.sent for s in classes))]
