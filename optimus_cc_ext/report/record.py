"""The record of a run: curves by TensorBoard tag, read from its event files or from its printed log."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from statistics import mean, quantiles

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.metrics.traffic import FALLBACK
from optimus_cc_ext.report import ReportError
from optimus_cc_ext.report.log_lines import parse_fallback, parse_progress, parse_scalars

__all__ = [
    "SECONDS", "TRAINING", "VALIDATION", "Curve", "Record", "Share", "read_events", "read_logs", "read_run", "shares",
]  # fmt: skip

_EVENTS = "events.out.tfevents.*"
TRAINING, VALIDATION, SECONDS = "lm loss", "lm loss validation", "iteration-time"


@dataclass(frozen=True)
class Curve:
    """A scalar over training: `values[i]` belongs to iteration `iterations[i]`. Statistics of an empty
    curve are NaN.
    """

    iterations: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        """The curve's value at the end of training."""
        return self.values[-1] if self.values else nan

    @property
    def mean(self) -> float:
        return mean(self.values) if self.values else nan

    @property
    def median(self) -> float:
        """The median over all iterations but the first, which includes one-time set-up."""
        return self.between(2).quartiles[1]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper quartile."""
        if len(self.values) < 2:
            return (self.last,) * 3
        lower, middle, upper = quantiles(self.values, n=4, method="inclusive")
        return lower, middle, upper

    def between(self, first: int, last: float = inf) -> "Curve":
        """Return the part of the curve from iteration `first` to iteration `last`."""
        kept = [(i, value) for i, value in zip(self.iterations, self.values, strict=True) if first <= i <= last]
        return Curve(tuple(i for i, _ in kept), tuple(value for _, value in kept))


@dataclass(frozen=True)
class Record:
    """The scalars of one run. Losses are in nats per token, times in seconds per iteration, traffic in bytes per
    iteration summed over all ranks.
    """

    source: Path
    scalars: dict[str, dict[int, float]]
    """The value of each scalar at each iteration, by tag."""

    fallback: str | None = None
    """The reason why torch compressed in place of Triton's kernels; None: the run logged none."""

    def curve(self, tag: str) -> Curve:
        """Return the curve of this tag; empty if the run did not log it."""
        points = sorted(self.scalars.get(tag, {}).items())
        return Curve(tuple(iteration for iteration, _ in points), tuple(value for _, value in points))

    def require(self, tags: Iterable[str]) -> None:
        """Raise ReportError if the run lacks a scalar, for example because it ended too early."""
        for tag in tags:
            if tag not in self.scalars:
                known = sorted(self.scalars)
                some = ", ".join(known[:5] + ["..."] * (len(known) > 5)) or "none"
                raise ReportError(f"{self.source}: no scalar '{tag}' (found: {some}). Look into the run's log")

    def largest(self, tag: str) -> float:
        """Return the largest value of this tag over all iterations, ranks and stages (`tag/rank 0`, ...); NaN if there
        is none.
        """
        tags = [known for known in self.scalars if known == tag or known.startswith(f"{tag}/")]
        return max((value for known in tags for value in self.scalars[known].values()), default=nan)

    @property
    def training(self) -> Curve:
        """The losses of the training batches."""
        return self.curve(TRAINING)

    @property
    def validation(self) -> Curve:
        """The losses of the validations within training."""
        return self.curve(VALIDATION)

    @property
    def seconds(self) -> Curve:
        """The seconds of each iteration; event files lack the first one."""
        return self.curve(SECONDS)

    def sent(self, traffic_class: str) -> Curve:
        """Return the bytes of a class of traffic that were sent."""
        return self.curve(f"optimus-cc/{traffic_class} sent bytes")

    def raw(self, traffic_class: str) -> Curve:
        """Return the bytes of a class of traffic that vanilla Megatron would have sent."""
        return self.curve(f"optimus-cc/{traffic_class} raw bytes")


def read_run(folder: Path) -> Record:
    """Read event files, or if there are none the logs (log*.txt) that scripts/paper keeps; raises ReportError."""
    if next(folder.rglob(_EVENTS), None) is None and TRAINING in (record := read_logs(folder)).scalars:
        return record
    return read_events(folder)


def read_events(folder: Path) -> Record:
    """Read the event files of one run, in `folder` or in one folder below it.

    Scalars are float32 in event files, so whole bytes are exact up to 16.7 MB. If an iteration was run twice, as by a
    resumed run, the later file counts.

    Raises:
        ReportError: there are no event files, or those of several runs, or a file ends in the middle of a record.
    """
    files = sorted(folder.rglob(_EVENTS), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ReportError(f"{folder}: no event files ({_EVENTS}). Train with --tensorboard-dir FOLDER")
    if others := {path.parent for path in files} - {files[0].parent}:
        raise ReportError(
            f"{folder}: event files of several runs, in {files[0].parent} and {min(others)}. Give the folder of one run"
        )
    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    earlier: tuple[Path, int] | None = None
    fallback: str | None = None
    for file in files:
        found, said = _read_events(file)
        fallback = said or fallback
        if not found:  # the run ended before its first iteration
            continue
        begins = min(step for steps in found.values() for step in steps)
        if earlier and begins <= earlier[1]:
            raise ReportError(
                f"{file}: starts at iteration {begins}, and {earlier[0].name} at {earlier[1]}: these are two runs, "
                "because"
                " a resumed run starts later. Give each run a folder of its own"
            )
        earlier = file, begins
        for tag, values in found.items():
            scalars[tag] |= values
    if not scalars:
        raise ReportError(f"{files[0]}: no scalars; the run may have ended before its first iteration. See its log")
    return Record(folder, {tag: dict(sorted(values.items())) for tag, values in scalars.items()}, fallback)


def _read_events(file: Path) -> tuple[dict[str, dict[int, float]], str | None]:
    """Return the scalars of one event file, the value at each step by tag, and the fallback that it names."""
    # tensorboard is imported here because it takes a second, which bad input should not wait for.
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    fallback: str | None = None
    loader = EventFileLoader(str(file))
    for event in loader.Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                # After training Megatron validates once more, at the same iteration on other text, and exits without a
                # flush, so the file may or may not have that value. The validation within training is always in the
                # file, and first.
                scalars[value.tag].setdefault(event.step, float(make_ndarray(value.tensor).item()))
            elif value.tag.startswith(FALLBACK):  # the value is a text, to whose tag TensorBoard adds a word
                fallback = make_ndarray(value.tensor).item().decode()
    if (read := _whole_records(file)) is not None:
        raise ReportError(
            f"{file}: the file ends in the middle of a record, at byte {read}: it is cut off or incompletely copied. "
            "Copy it again, or give another run"
        )
    return scalars, fallback


def _whole_records(file: Path) -> int | None:
    """Return the byte at which an incomplete record begins; None if all records are complete."""
    # A record is its length (8 bytes), a checksum of the length (4), the data, and a checksum of the data (4).
    # TensorBoard also reads files that are still being written, and therefore takes half a record for the end.
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
    """Read log*.txt in `folder` in the order of their modification. If an iteration was run twice, the later one
    counts.
    """
    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    fallback: str | None = None
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
                fallback = parse_fallback(line) or fallback
    return Record(folder, dict(scalars), fallback)


@dataclass(frozen=True)
class Share:
    """Bytes of one class of traffic in an iteration, summed over all ranks."""

    name: str
    raw: float
    sent: float

    @property
    def ratio(self) -> float:
        """The fraction sent / raw; 1 if there is no such traffic."""
        return self.sent / self.raw if self.raw else 1.0


def shares(record: Record) -> list[Share]:
    """Return the mean raw and sent bytes per iteration of each class that the run logged, then their sum."""
    # The mean is NaN if the run did not log the class.
    names = [each.tag for each in CLASSES if record.raw(each.tag).mean > 0]
    classes = [Share(name, record.raw(name).mean, record.sent(name).mean) for name in names]
    return [*classes, Share("all traffic", sum(s.raw for s in classes), sum(s.sent for s in classes))]
