"""Comparison of one run, or of two side by side: numbers, tables, pictures and contradictions, for
`optimus-cc report`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.metrics.traffic import BETWEEN_NODES
from optimus_cc_ext.tools.data.output import check_replaceable, locked, replace
from optimus_cc_ext.tools.report import NoRows, ReportError, require
from optimus_cc_ext.tools.report.document import Box, Part, Picture, Points, ReportDocument
from optimus_cc_ext.tools.report.log_lines import OLD_NAMES
from optimus_cc_ext.tools.report.record import (
    NORM,
    OUR_SECONDS,
    SECONDS,
    TRAINING,
    VALIDATION,
    Curve,
    Record,
    Share,
    read_run,
    shares,
)
from optimus_cc_ext.tools.report.table import Cell, Table, printed

PICTURES = ("gain", "training_loss", "validation_loss", "loss_difference", "gradient_norm", "seconds", "errors")
"""Names of the pictures, without the suffixes `.png`, `.svg` and `.pdf`; a picture without data is not drawn."""

FILES = (
    *(f"{name}.csv" for name in ("losses", "times", "traffic", "compression", "scalars")),
    *(f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg", "pdf")),
)
"""Names of all files that the document of a comparison may write beside its page."""

_TRAFFIC = tuple(
    f"optimus-cc/{traffic.tag} {side} bytes"
    for traffic in CLASSES
    for side in ("raw", "sent")
    # Earlier versions did not log what only models with experts send, and their runs are still read.
    if all(need.fact != "expert_parallel" for need in traffic.needs)
)
_COMPRESSION = re.compile(
    r"optimus-cc/(?P<technique>[\w ]+) (?P<kind>relative error|residual norm|milliseconds)(?:/(?P<stage>.+))?"
)
REQUIRED = (TRAINING, VALIDATION, SECONDS, *_TRAFFIC)
"""Tags that a run has to have logged for the report to be complete."""


def relative(new: float, old: float) -> float:
    """Return the difference of `new` and `old` as a fraction of `old`."""
    return (new - old) / old if old else nan


@dataclass(frozen=True)
class Comparison:
    """Runs of the same training, by name. If there are two, the second is compared with the first."""

    runs: Mapping[str, Record]
    spans: Mapping[str, tuple[int, float]] = field(default_factory=lambda: {"": (2, inf)})
    """First and last iteration of each span over which seconds are compared, by a description of the span."""

    band: float | None = None
    """Largest change of the first run's loss by other orders of the batches, as a fraction of the loss;
    None: unknown.
    """

    first_is_vanilla: bool = False
    without_rows: Sequence[str] = ()
    """One line for each run that has logged nothing."""

    @property
    def first(self) -> Record:
        """The run that the other one is compared with, or the only run."""
        return next(iter(self.runs.values()))

    @property
    def last(self) -> Record:
        """The run that is compared, or the only run."""
        return list(self.runs.values())[-1]

    def complaints(self) -> list[str]:
        """Return contradictions between runs: raw bytes must be equal in all runs, and vanilla must send
        exactly these.
        """
        said = []
        for name in (traffic.tag for traffic in CLASSES):
            if self.first_is_vanilla and self.first.raw(name) != self.first.sent(name):
                said.append(f"{name}: the vanilla run did not send its raw bytes")
            for (old, a), (new, b) in pairwise(self.runs.items()):
                raws = [dict(zip(each.raw(name).iterations, each.raw(name).values, strict=True)) for each in (a, b)]
                if any(raws[0][common] != raws[1][common] for common in raws[0].keys() & raws[1].keys()):
                    said.append(
                        f"{name}: raw bytes per iteration are {b.raw(name).mean:,.0f} in {new}, {a.raw(name).mean:,.0f}"
                        f" in {old}: these are not runs of the same training"
                    )
        if len({record.training.iterations for record in self.runs.values()}) > 1:
            said.append("the two runs did not log the same iterations")
        return said

    def missing(self) -> list[str]:
        """Return one line for each quantity that a run did not log, with the flag that logs it."""
        cures = {
            (TRAINING,): "no training loss",
            (VALIDATION,): "no validation loss (--eval-interval)",
            (NORM,): "no gradient norms",
            (SECONDS, OUR_SECONDS): "no times (--log-timers-to-tensorboard)",
            _TRAFFIC: "no traffic and no errors (vanilla Megatron does not count them, nor does optimus_cc_ext with"
            " --no-compression-metrics)",
        }
        found = [
            f"{name}: {said}"
            for name, record in self.runs.items()
            for tags, said in cures.items()
            if not record.scalars.keys() & set(tags)
        ]
        return [*self.without_rows, *found, *(line for item in self.runs.items() for line in _not_finite(*item))]

    def fallbacks(self) -> list[str]:
        """Return one line for each run that was compressed by torch in place of Triton's kernels, with the reason."""
        found = ((name, record.fallback) for name, record in self.runs.items())
        return [f"{name}: compressed by torch, which takes longer: {reason}" for name, reason in found if reason]

    def left_out(self) -> list[str]:
        """Return one line for each part of a run that was not read, or that a later attempt replaced as a whole."""
        return [f"{name}: {said}" for name, record in self.runs.items() for said in record.notes]

    def tables(self) -> list[Table]:
        """Return the tables that have rows."""
        return [table for table in (self.losses(), self.times(), self.traffic(), self.compression()) if table.rows]

    def losses(self) -> Table:
        """Return the table of losses at the end of training."""
        rows = [
            _row(f"final {name} loss", [record.curve(tag).last for record in self.runs.values()], ".4f")
            for name, tag in (("training", TRAINING), ("validation", VALIDATION))
        ]
        norms = [record.curve(NORM).median for record in self.runs.values()]
        rows += [_row("gradient norm, median", norms, ".4f")] if not all(map(isnan, norms)) else []
        ends = dict.fromkeys(max(record.training.iterations, default=0) for record in self.runs.values())
        title = f"After {' and '.join(map(str, ends))} iterations"
        return Table(self._columns(), rows, title, name="losses")

    def times(self) -> Table:
        """Return the table of median seconds per iteration, over each span."""
        rows = [
            _row(f"seconds per iteration{where and ', '}{where}", [median for _, median, _ in of_runs.values()], ".3f")
            for where, of_runs in self.seconds().items()
        ]
        for what, tag, form, unit in (
            ("dense seconds in the run's own trial", "optimus-cc/dense trial seconds", ".3f", 1.0),
            ("MB of memory on a rank for compression", "optimus-cc/memory bytes", ".1f", 1e-6),
        ):
            found = [unit * record.curve(tag).last for record in self.runs.values()]
            rows += [_row(what, found, form)] if not all(map(isnan, found)) else []
        bars = tuple(self.runs) if len(self.runs) > 1 else ()
        return Table(self._columns(), rows, "Time and memory", "Medians.", bars=bars, name="times")

    def seconds(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """Return the quartiles of the seconds per iteration, by span and run."""
        return {
            where: {name: record.seconds.between(*span).quartiles for name, record in self.runs.items()}
            for where, span in self.spans.items()
        }

    def traffic(self) -> Table:
        """Return the table of raw bytes of each class, and of sent bytes of each run that compressed something."""
        by_run = self._shares()
        shown = {
            name: {share.name: share for share in found}
            for name, found in by_run.items()
            if name == [*by_run][-1] or any(share.raw != share.sent for share in found)
        }
        rows: list[tuple[Cell, ...]] = []
        for share in max(by_run.values(), key=len, default=[]):
            here = [found.get(share.name, Share(share.name, 0, 0)) for found in shown.values()]
            sent = (cell for each in here for cell in (f"{each.sent / 1e6:.3f}", f"{each.ratio:.1%}"))
            rows.append((share.name, f"{share.raw / 1e6:.3f}", *sent))
        leaving = [record for name, record in self.runs.items() if name in shown and record.raw(BETWEEN_NODES).values]
        if len(leaving) == len(shown) > 0:
            both = [(record.raw(BETWEEN_NODES).mean, record.sent(BETWEEN_NODES).mean) for record in leaving]
            cells = (cell for raw, sent in both for cell in (f"{sent / 1e6:.3f}", f"{sent / raw:.1%}"))
            rows.insert(len(rows) - 1, (f"of these {BETWEEN_NODES}", f"{both[0][0] / 1e6:.3f}", *cells))
        columns = ("", "raw MB", *(cell for name in shown for cell in (f"{name}, MB", "of raw")))
        note = "Logical bytes. Raw: the bytes that vanilla Megatron sends."
        title, bars = "Traffic per iteration, all ranks", tuple(name for name in columns if name.endswith("MB"))
        return Table(columns, rows, title, note, last_is_sum=True, bars=bars, name="traffic")

    def compression(self) -> Table:
        """Return the table of mean error, residual norm and milliseconds of each technique, by stage."""
        kinds = {"relative error": ("error, %", 100), "residual norm": ("residual norm", 1), "milliseconds": ("ms", 1)}
        found: dict[str, dict[tuple[str, str], float]] = {}
        for name, record in self.runs.items():
            for tag, match in _compression(record):
                found.setdefault(_place(match), {})[name, match["kind"]] = record.curve(tag).mean
        said = {column for values in found.values() for column in values}
        columns = [(name, kind) for name in self.runs for kind in kinds if (name, kind) in said]
        rows: list[tuple[Cell, ...]] = [
            (row, *(values[c] * kinds[c[1]][1] if c in values else None for c in columns))
            for row, values in sorted(found.items())
        ]
        several = len({name for name, _ in columns}) > 1
        titles = [f"{name}: {kinds[kind][0]}" if several else kinds[kind][0] for name, kind in columns]
        note = "Error: |compression error| / |compressed tensor|."
        return Table(("", *titles), rows, "Compression", note, name="compression")

    def scalars(self) -> Table:
        """Return every scalar of every iteration as a table."""
        return Table(("run", "scalar", "iteration", "value"), [
            (name, tag, iteration, value)
            for name, record in self.runs.items()
            for tag, values in record.scalars.items()
            for iteration, value in values.items()
        ], name="scalars")  # fmt: skip

    def document(
        self, title: str, lead: str, before: Sequence[Part] = (), after: Sequence[Part] = ()
    ) -> ReportDocument:
        """Return the document of the comparison, with the parts `before` and `after` around its own parts."""
        drawn, complaints, missing = self._pictures(), self.complaints(), self.missing()
        alarm = Box("Cross-check failed: the bytes below are not reliable", [Points.of(complaints)], "card alarm")
        parts = [
            *before,
            *([alarm] if complaints else []),
            *([Box("Not compressed by Triton's kernels", [Points.of(self.fallbacks())])] if self.fallbacks() else []),
            Box("", [*self.tables(), *drawn], "grid wide"),
            *([Box("Not logged", [Points.of(missing)])] if missing else []),
            *([Box("Left out", [Points.of(self.left_out())])] if self.left_out() else []),
            *after,
        ]
        empty = [table for table in (self.traffic(), self.compression()) if not table.rows]
        return ReportDocument(title, lead, parts, files=[*empty, self.scalars(), *self._gain()])

    def _pictures(self) -> list[Picture]:
        # The pictures are imported here: matplotlib takes a second, which the tables should not wait for.
        from optimus_cc_ext.tools.report import pictures

        drawn, two = [], len(self.runs) > 1
        known = [tag for tag in (TRAINING, VALIDATION) if all(tag in record.scalars for record in self.runs.values())]
        for tag in known if not self.first_is_vanilla else ():
            name = "training_loss" if tag == TRAINING else "validation_loss"
            title = name.capitalize().replace("_", " ")
            drawn.append(Picture(name, pictures.loss_curves(title, self._curves(tag)), _said(title, self._curves(tag))))
        if two and (shared := [tag for tag in known if pictures.differences(self._curves(tag))]):
            title = f"{'Validation' if shared[-1] == VALIDATION else 'Training'} loss: difference"
            figure = pictures.loss_difference(title, self._curves(shared[-1]), self.band)
            drawn.append(Picture("loss_difference", figure, self._difference(shared[-1])))
        for name, title, label, drawable in (
            ("gradient_norm", "Gradient norm", "before clipping", self._curves(NORM)),
            ("seconds", "Seconds per iteration", "s", {name: each.seconds for name, each in self.runs.items()}),
        ):
            if any(curve.values for curve in drawable.values()) and not self.first_is_vanilla:
                drawn.append(Picture(name, pictures.curves(title, label, drawable), _said(title, drawable)))
        errors = {
            (name, _place(match)): record.curve(tag)
            for name, record in self.runs.items()
            for tag, match in _compression(record)
            if match["kind"] == "relative error"
        }
        if errors:
            several = len({name for name, _ in errors}) > 1
            named = {f"{name}: {place}" if several else place: curve for (name, place), curve in errors.items()}
            figure = pictures.curves("Relative compression error", "|error| / |compressed tensor|", named)
            means = "; ".join(f"{name}: {curve.mean:.2%}" for name, curve in named.items())
            drawn.append(Picture("errors", figure, f"Relative compression error, means: {means}."))
        return drawn

    def _gain(self) -> list[Picture]:
        """Return the picture of seconds, bytes and loss, which the page tells in tables with bars; none for one run."""
        from optimus_cc_ext.tools.report import pictures

        seconds, by_run = self.seconds(), self._shares()
        whole = all({TRAINING, VALIDATION} <= record.scalars.keys() for record in self.runs.values())
        if len(self.runs) < 2 or not whole or len(by_run) < len(self.runs) or _lacks(seconds):
            return []
        if not pictures.differences(self._curves(VALIDATION)):
            return []
        times = "; ".join(
            f"{where}: {', '.join(f'{name} {median:.2f} s' for name, (_, median, _) in by_name.items())}"
            for where, by_name in seconds.items()
        )
        sent = ", ".join(f"{name} {shares[-1].sent / 1e6:.1f} MB" for name, shares in by_run.items())
        figure = pictures.gain(seconds, self._curves(VALIDATION), by_run, self.band)
        return [Picture("gain", figure, f"{times}. Sent: {sent}. {self._difference(VALIDATION)}")]

    def _difference(self, tag: str) -> str:
        from optimus_cc_ext.tools.report.pictures import differences

        (first, last), gaps = self.runs, differences(self._curves(tag))
        ended, largest = gaps[max(gaps)], max((abs(gap) for gap in gaps.values() if isfinite(gap)), default=nan)
        band = f"; {first}'s own batches in another order move it by {self.band:.2%}" if self.band else ""
        loss = "Validation loss" if tag == VALIDATION else "Training loss"
        return f"{loss} of {last} over {first}'s: {ended:+.2%} at the end, at most {largest:.2%}{band}."

    def _shares(self) -> dict[str, list[Share]]:
        """Return the bytes of each run that has logged them, by class."""
        by_run = {name: shares(record) for name, record in self.runs.items()}
        return {name: found for name, found in by_run.items() if len(found) > 1}

    def _curves(self, tag: str) -> dict[str, Curve]:
        return {name: record.curve(tag) for name, record in self.runs.items()}

    def _columns(self) -> tuple[str, ...]:
        return ("", *self.runs, *(["difference"] if len(self.runs) > 1 else []))

    def summary(self) -> dict[str, Any]:
        """Return the most important results as plain JSON values."""
        return {
            "final_validation_loss": {name: record.validation.last for name, record in self.runs.items()},
            "final_validation_loss_change": relative(self.last.validation.last, self.first.validation.last),
            "seconds_per_iteration": self.seconds(),
            "traffic_bytes_per_iteration": {s.name: asdict(s) | {"ratio": s.ratio} for s in shares(self.last)},
            "raw_equals_what_vanilla_sent": not self.complaints(),
            "complaints": self.complaints(),
        }


def _lacks(seconds: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> bool:
    """Return whether a run has no seconds in a span, as one of a single iteration."""
    return any(isnan(median) for by_run in seconds.values() for _, median, _ in by_run.values())


def _not_finite(name: str, record: Record) -> Iterator[str]:
    """Yield a line for each curve of a run that has values which no picture can show."""
    for tag in (TRAINING, VALIDATION, NORM):
        if bad := [i for i, value in record.scalars.get(tag, {}).items() if not isfinite(value)]:
            yield f"{name}: {tag} is not finite in {len(bad)} iterations, from {bad[0]} on; these are not drawn"


def _said(title: str, curves: Mapping[str, Curve]) -> str:
    """Return a title, and the first and the last value of each curve that has any."""
    ends = (f"{name} {curve.values[0]:.4g} to {curve.last:.4g}" for name, curve in curves.items() if curve.values)
    return f"{title}: {'; '.join(ends)}."


def _compression(record: Record) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield each tag of a technique's error, residual norm or milliseconds, with its match."""
    for tag in record.scalars:
        if match := _COMPRESSION.fullmatch(tag):
            yield tag, match


def _place(match: re.Match[str]) -> str:
    """Return the technique and the stage that a tag names; tags read from a log have no stage."""
    technique = match["technique"]
    return ", ".join(filter(None, (OLD_NAMES.get(technique, technique), match["stage"])))


def _row(name: str, values: Sequence[float], form: str) -> tuple[Cell, ...]:
    """Return a table's row: the values and the relative change from the first to the second, None if unknown."""
    changes = [relative(new, old) for old, new in pairwise(values)]
    cells = [*((value, form) for value in values), *((change, "+.2%") for change in changes)]
    return name, *(None if isnan(value) else format(value, form) for value, form in cells)


def write_report(folders: list[Path], output: Path) -> None:
    """Write index.html, CSV and pictures into `output`, which appears complete or not at all, and print the tables.

    Raises:
        ReportError: a folder has no run or more than one, or the two runs have no iteration in common.
        DataError: `output` contains files that a report does not write.
        MissingExtra: the extra `report` is not installed.
    """
    require()
    if len(folders) > 2:
        raise ReportError(f"{len(folders)} folders: a report shows one run, or two side by side. Give one or two")
    for folder in folders:
        check_replaceable(output, folder.resolve(), {"index.html", *FILES})
    runs, without = dict[str, Record](), list[NoRows]()
    for name, folder in zip(_names(folders), folders, strict=True):
        try:
            runs[name] = read_run(folder)
        except NoRows as error:
            without.append(error)
    if not runs:
        raise without[0]
    comparison = Comparison(runs, without_rows=list(map(str, without)))
    for record in comparison.runs.values():
        record.require((TRAINING,))
    first, last = comparison.first.training.iterations, comparison.last.training.iterations
    if not set(first) & set(last):
        raise ReportError(
            f"{folders[-1]}: the run has no iteration in common with {folders[0]}. Give two runs of the same training"
        )
    names = list(comparison.runs)
    title = f"{names[-1]} against {names[0]}" if len(names) > 1 else names[0]
    lead = f"Iterations {first[0]} to {first[-1]}; read from {', '.join(map(str, folders))}."
    with locked(output.absolute()) as partial:
        comparison.document(title, lead).write(partial, page="index.html")
        replace(partial, output)
    print(printed(comparison.tables(), "table"), end="")
    for said in [*comparison.complaints(), *comparison.fallbacks(), *comparison.missing(), *comparison.left_out()]:
        print(f"note: {said}")
    print(f"written: {output / 'index.html'}")


def _names(folders: list[Path]) -> list[str]:
    """Return the shortest names, from the ends of the paths, that distinguish the folders."""
    words = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, words)) + 1):
        names = ["/".join(each[-length:]) for each in words]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({place})" for place, name in enumerate(names, start=1)]
