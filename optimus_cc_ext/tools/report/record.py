"""The record of a run: curves by TensorBoard tag, read from its event files or from its printed log."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from statistics import mean, quantiles

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.metrics.traffic import FALLBACK
from optimus_cc_ext.tools.report import NoRows, ReportError
from optimus_cc_ext.tools.report.log_lines import (
    Progress,
    lacks_loss,
    log_files,
    parse_fallback,
    parse_progress,
    parse_scalars,
)

_EVENTS = "events.out.tfevents.*"
TRAINING, VALIDATION, SECONDS, NORM = "lm loss", "lm loss validation", "iteration-time", "grad-norm"
OUR_SECONDS = "optimus-cc/iteration seconds"
"""Tag of the seconds that our own metrics have at each logging interval."""

_BY_SAMPLES = " vs samples"
"""End of the tags of which Megatron counts the steps in samples."""

_Scalars = dict[str, dict[int, float]]
_STAMPED = re.compile(r"\[(\d{4}-\d\d-\d\d [\d:.]+)\] iteration +\d+/")

_OTHERS = {
    "reduced_train_loss": "NeMo",
    "train/loss": "Hugging Face Trainer",
    "train/lm_loss": "GPT-NeoX",
    "loss/lm loss": "Megatron-DeepSpeed",
    "lm-loss-training/lm loss": "Megatron-DeepSpeed",
    "actor/pg_loss": "verl",
}
"""Projects by the tag of their training loss."""


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

    notes: tuple[str, ...] = ()
    """Words about what was left out."""

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
                who = next((who for other, who in _OTHERS.items() if other in self.scalars), None)
                cure = f"These are {who}'s tags; only Megatron's are read" if who else "Look into the run's log"
                raise ReportError(f"{self.source}: no scalar '{tag}' (found: {some}). {cure}")

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
        """The seconds of each iteration, or of those that our own metrics have; event files lack the first one."""
        return self.curve(SECONDS if SECONDS in self.scalars else OUR_SECONDS)

    def sent(self, traffic_class: str) -> Curve:
        """Return the bytes of a class of traffic that were sent."""
        return self.curve(f"optimus-cc/{traffic_class} sent bytes")

    def raw(self, traffic_class: str) -> Curve:
        """Return the bytes of a class of traffic that vanilla Megatron would have sent."""
        return self.curve(f"optimus-cc/{traffic_class} raw bytes")


def read_run(path: Path) -> Record:
    """Read the event files of a run, or if there are none its logs: a file, or those of a folder; raises
    ReportError.
    """
    if not path.exists():
        raise ReportError(f"{path}: no such file or folder. Give the folder of --tensorboard-dir, or a log")
    if re.search(r"\.tfevents\.", path.name) or (path.is_dir() and next(path.rglob(_EVENTS), None)):
        return read_events(path)
    record = read_logs(path)
    if not record.scalars and record.notes:
        raise NoRows(f"{path}: {record.notes[0]}")
    if not record.scalars:
        raise NoRows(
            f"{path}: no event files ({_EVENTS}), and no iterations with 'lm loss' in a log of Megatron (*.txt, *.log, "
            "*.out). Train with --tensorboard-dir FOLDER"
        )
    return record


def read_events(path: Path) -> Record:
    """Read the event files of one run, in `path` or in one folder below it, in the order of the times in their names.

    Scalars are float32 in event files, so whole bytes are exact up to 16.7 MB. Of iterations that were run again, as by
    a resumed run, the last attempt counts, even if it came less far. A run that begins again leaves out all before.

    Raises:
        ReportError: there are no event files, or those of several folders.
    """
    files = [path] if path.is_file() else list(path.rglob(_EVENTS))
    if not files:
        raise ReportError(f"{path}: no event files ({_EVENTS}). Train with --tensorboard-dir FOLDER")
    if others := {file.parent for file in files} - {files[0].parent}:
        raise ReportError(
            f"{path}: event files of several runs, in {files[0].parent} and {min(others)}. Give one folder or file"
        )
    read = sorted((_read_events(file) for file in files), key=lambda each: each.written)
    scalars: _Scalars = {}
    notes = [each.note for each in read if each.note]
    for each in read:
        for attempt in each.attempts:
            first, begins = (min(steps.get(TRAINING, ()), default=inf) for steps in (scalars, attempt))
            if begins <= first < inf:
                notes.append(_begins_again(each.file, begins))
            samples = min(attempt.get(TRAINING + _BY_SAMPLES, ()), default=inf)
            kept = _before(scalars, begins, samples)
            scalars = kept | {tag: kept.get(tag, {}) | values for tag, values in attempt.items()}
    if not scalars:
        raise NoRows(f"{files[0]}: no scalars; the run may have ended before its first iteration. See its log")
    fallback = next((each.fallback for each in reversed(read) if each.fallback), None)
    return Record(path, {tag: dict(sorted(values.items())) for tag, values in scalars.items()}, fallback, tuple(notes))


def _begins_again(file: Path, iteration: float) -> str:
    return f"{file.name}: begins again at {iteration}; what was before is left out"


def _before(scalars: _Scalars, iteration: float, samples: float = inf) -> _Scalars:
    """Return the scalars before an iteration, at which a later attempt began; `samples` is its step in samples."""
    return {
        tag: kept
        for tag, values in scalars.items()
        if (kept := {i: v for i, v in values.items() if i < (samples if tag.endswith(_BY_SAMPLES) else iteration)})
    }


@dataclass(frozen=True)
class _EventFile:
    """Contents of one event file."""

    file: Path
    attempts: list[_Scalars]
    """The value at each step by tag; a run that restarted within its process has several attempts in one file."""

    written: tuple[int, float]
    """The time in the file's name, and the exact time of its first event."""

    fallback: str | None
    note: str


def _read_events(file: Path) -> _EventFile:
    # tensorboard is imported here because it takes a second, which bad input should not wait for.
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    attempts: list[_Scalars] = [defaultdict(dict)]
    fallback: str | None = None
    began, read, last = 0.0, 0, -1
    for event in EventFileLoader(str(file)).Load():
        began, read = began or event.wall_time, read + 1
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                if value.tag == TRAINING:
                    if event.step <= last:
                        attempts.append(defaultdict(dict))
                    last = event.step
                # After training Megatron validates once more, at the same iteration on other text, and exits without a
                # flush, so the file may or may not have that value. The validation within training is always in the
                # file, and first.
                attempts[-1][value.tag].setdefault(event.step, float(make_ndarray(value.tensor).item()))
            elif value.tag.startswith(FALLBACK):  # the value is a text, to whose tag TensorBoard adds a word
                fallback = make_ndarray(value.tensor).item().decode()
    stamp = re.search(r"tfevents\.(\d+)", file.name)
    note = f"{file.name}: after {read} records the file is cut off, damaged or still written"
    written = int(stamp[1]) if stamp else 0, began
    return _EventFile(file, attempts, written, fallback, note if read < _records(file) else "")


def _records(file: Path) -> int:
    """Return the number of records of an event file, the last of which may be cut."""
    # A record is its length (8 bytes), a checksum of the length (4), the data, and a checksum of the data (4).
    # TensorBoard also reads files that are still being written, and therefore takes a bad record for the end.
    size, place, records = file.stat().st_size, 0, 0
    with file.open("rb") as stream:
        while place < size:
            stream.seek(place)
            place += 16 + int.from_bytes(stream.read(8), "little")
            records += 1
    return records


def read_logs(path: Path) -> Record:
    """Read a log, or those of a folder in the order of their first iterations' time stamps, else of their modification.

    Of iterations that were run again the last attempt counts, even if it came less far.
    """
    scalars: _Scalars = defaultdict(dict)
    fallback: str | None = None
    notes: list[str] = []
    last: Progress | None = None
    skipped = 0
    for log in sorted(log_files(path) if path.exists() else [], key=_log_order):
        iteration = 0
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if progress := parse_progress(line):
                    if progress.seconds is not None:
                        iteration = progress.iteration
                        if last and iteration <= last.iteration and progress != last:
                            scalars = defaultdict(dict, _before(scalars, iteration))
                            if not scalars.get(TRAINING):
                                notes.append(_begins_again(log, iteration))
                        last = progress
                        scalars[TRAINING][iteration], scalars[SECONDS][iteration] = progress.loss, progress.seconds
                        if progress.gradient_norm is not None:
                            scalars[NORM][iteration] = progress.gradient_norm
                    elif " on test set" not in line:
                        # After training Megatron validates once more, on other samples.
                        scalars[VALIDATION].setdefault(progress.iteration, progress.loss)
                for tag, value in parse_scalars(line).items():
                    scalars[tag][iteration] = value
                fallback, skipped = parse_fallback(line) or fallback, skipped + lacks_loss(line)
    if skipped:
        notes.append(f"{skipped} log lines of iterations have no loss: all were skipped, or it was not logged")
    return Record(path, dict(scalars), fallback, tuple(notes))


def _log_order(log: Path) -> tuple[str, float, str]:
    """Return the time stamp of a log's first iteration, and what orders logs without: a copy's modification tells
    little.
    """
    with log.open(encoding="utf-8", errors="replace") as lines:
        stamps = (_STAMPED.search(line) for line in lines)
        stamp = next((match[1] for match in stamps if match), "")
    return stamp, log.stat().st_mtime, log.name


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
