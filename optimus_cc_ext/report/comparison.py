"""One run, or two side by side: numbers, tables, pictures, and what does not add up."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.report import page
from optimus_cc_ext.report.record import SECONDS, TRAINING, VALIDATION, Record, Share, shares
from optimus_cc_ext.report.table import Cell, Table

__all__ = ["FILES", "PICTURES", "REQUIRED", "Comparison", "relative"]

PICTURES = ("gain", "training_loss", "validation_loss", "seconds", "traffic", "errors")
"""Names of the pictures, without `.png`, `.svg` and `.pdf`, as far as there is something to show."""

_TABLES = ("losses", "times", "traffic", "compression", "scalars")
"""Names of the tables, without `.csv`. The last has every scalar of every iteration."""

FILES = (
    *(f"{name}.csv" for name in _TABLES),
    *(f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg", "pdf")),
)
"""All that `Comparison.write` may write."""

_TRAFFIC = tuple(f"optimus-cc/{traffic.tag} {side} bytes" for traffic in CLASSES for side in ("raw", "sent"))
_COMPRESSION = re.compile(
    r"optimus-cc/(?P<technique>\w+) (?P<kind>relative error|residual norm|milliseconds)(?:/(?P<stage>.+))?"
)
REQUIRED = (TRAINING, VALIDATION, SECONDS, *_TRAFFIC)
"""Tags that a run has to have logged for nothing to be missing."""


def relative(new: float, old: float) -> float:
    """How much larger `new` is than `old`, as a fraction of `old`."""
    return (new - old) / old


@dataclass(frozen=True)
class Comparison:
    """Runs of the same training by name: one, or two of which the first is what the second is held against."""

    runs: Mapping[str, Record]
    spans: Mapping[str, tuple[int, float]] = field(default_factory=lambda: {"": (2, inf)})
    """First and last iteration of what seconds are compared over, by what was special there."""

    band: float | None = None
    """How far other orders of the batches move the first's loss, as a fraction of it; None: not known."""

    first_is_vanilla: bool = False

    @property
    def first(self) -> Record:
        """What is compared against, or all there is."""
        return next(iter(self.runs.values()))

    @property
    def last(self) -> Record:
        """What is compared, or all there is."""
        return list(self.runs.values())[-1]

    def complaints(self) -> list[str]:
        """What contradicts itself: "raw" must mean the same in all runs, namely what vanilla really sends."""
        said = []
        for name in (traffic.tag for traffic in CLASSES):
            if self.first_is_vanilla and self.first.raw(name) != self.first.sent(name):
                said.append(f"{name}: the vanilla run did not send its raw bytes")
            for (old, a), (new, b) in pairwise(self.runs.items()):
                if a.raw(name).values and b.raw(name).values and a.raw(name) != b.raw(name):
                    said.append(
                        f"{name}: raw bytes per iteration are {b.raw(name).mean:,.0f} in {new}, {a.raw(name).mean:,.0f}"
                        f" in {old}, or of other iterations: not the same training"
                    )
        if len({record.training.iterations for record in self.runs.values()}) > 1:
            said.append("the two runs did not log the same iterations")
        return said

    def missing(self) -> list[str]:
        """What was not logged, and what logs it."""
        cures = {
            (TRAINING,): "no training loss",
            (VALIDATION,): "no validation loss (--eval-interval)",
            (SECONDS,): "no times (--log-timers-to-tensorboard)",
            _TRAFFIC: "no traffic and no errors: Megatron alone does not count them, nor optimus_cc_ext with"
            " --no-compression-metrics",
        }
        return [
            f"{name}: {said}"
            for name, record in self.runs.items()
            for tags, said in cures.items()
            if not record.scalars.keys() & set(tags)
        ]

    def losses(self) -> Table:
        """At the end."""
        rows = [
            _row(f"final {name} loss", [record.curve(tag).last for record in self.runs.values()], ".4f")
            for name, tag in (("training", TRAINING), ("validation", VALIDATION))
        ]
        return Table(self._columns(), rows, f"After {max(self.first.training.iterations, default=0)} iterations")

    def times(self) -> Table:
        """Seconds per iteration."""
        rows = [
            _row(f"seconds per iteration{where and ', '}{where}", [median for _, median, _ in of_runs.values()], ".3f")
            for where, of_runs in self.seconds().items()
        ]
        return Table(self._columns(), rows, "Time", "Medians.")

    def seconds(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """Span and run to the quartiles of an iteration's seconds."""
        return {
            where: {name: record.seconds.between(*span).quartiles for name, record in self.runs.items()}
            for where, span in self.spans.items()
        }

    def traffic(self) -> Table:
        """By class: raw, and what each run sent that did not send just that."""
        of_runs = {name: of for name, record in self.runs.items() if len(of := shares(record)) > 1}
        shown = {
            name: {share.name: share for share in of}
            for name, of in of_runs.items()
            if name == [*of_runs][-1] or any(share.raw != share.sent for share in of)
        }
        rows: list[tuple[Cell, ...]] = []
        for share in max(of_runs.values(), key=len, default=[]):
            here = [of.get(share.name, Share(share.name, 0, 0)) for of in shown.values()]
            sent = (cell for each in here for cell in (f"{each.sent / 1e6:.3f}", f"{each.ratio:.1%}"))
            rows.append((share.name, f"{share.raw / 1e6:.3f}", *sent))
        columns = ("", "raw MB", *(cell for name in shown for cell in (f"{name}, MB", "of raw")))
        note = "Logical bytes. Raw: what vanilla Megatron sends."
        return Table(columns, rows, "Traffic per iteration, all ranks", note, last_is_sum=True)

    def compression(self) -> Table:
        """What each technique leaves out of what it compresses, and what it takes, by stage: means."""
        kinds = {"relative error": ("error, %", 100), "residual norm": ("residual norm", 1), "milliseconds": ("ms", 1)}
        found: dict[str, dict[str, float]] = {}
        for name, record in self.runs.items():
            for tag in record.scalars:
                if match := _COMPRESSION.fullmatch(tag):
                    found.setdefault(_place(match), {})[f"{name}: {match['kind']}"] = record.curve(tag).mean
        columns = [f"{name}: {kind}" for name in self.runs for kind in kinds]
        columns = [column for column in columns if any(column in values for values in found.values())]
        rows: list[tuple[Cell, ...]] = [
            (row, *(values[c] * kinds[c.rsplit(": ", 1)[1]][1] if c in values else None for c in columns))
            for row, values in sorted(found.items())
        ]
        heads = (column.rsplit(": ", 1) for column in columns)
        titles = [f"{name}: {kinds[kind][0]}" if len(self.runs) > 1 else kinds[kind][0] for name, kind in heads]
        note = "Error: |left out| / |what was compressed|. CB: backward messages, SC: DP gradients, FE: embedding."
        return Table(("", *titles), rows, "Compression", note)

    def scalars(self) -> Table:
        """Everything that was logged."""
        return Table(("run", "scalar", "iteration", "value"), [
            (name, tag, iteration, value)
            for name, record in self.runs.items()
            for tag, values in record.scalars.items()
            for iteration, value in values.items()
        ])  # fmt: skip

    def write(self, folder: Path) -> list[str]:
        """Write pictures and CSV into `folder`; return the blocks of the page that shows them."""
        # Here, not above: matplotlib takes a second, which tables need not wait for.
        from optimus_cc_ext.report.pictures import save

        for name in _TABLES:
            getattr(self, name)().write_csv(folder / f"{name}.csv")
        drawn = self._figures()
        for name, figure in drawn.items():
            save(figure, folder, name)
        pictures = {name: page.card("", page.picture(folder / f"{name}.svg")) for name in drawn}
        tables = [self.losses(), self.times(), self.traffic(), self.compression()]
        return [
            page.alarm("Cross-check failed: do not trust the bytes", self.complaints()),
            pictures.pop("gain", ""),
            page.grid(*pictures.values(), wide=True),
            page.grid(*(page.card(table.title, table.html()) for table in tables if table.rows), wide=True),
            page.card("Not logged", page.listed(self.missing())) if self.missing() else "",
        ]

    def _figures(self) -> dict[str, Figure]:
        from optimus_cc_ext.report import pictures

        drawn: dict[str, Figure] = {}
        of = {name: shares(record) for name, record in self.runs.items()}
        with_traffic = {name: each for name, each in of.items() if len(each) > 1}
        if len(self.runs) > 1 and not self.missing():
            drawn["gain"] = pictures.gain(self.seconds(), self._curves(VALIDATION), of)
        for name, tag in (("training", TRAINING), ("validation", VALIDATION)):
            if all(tag in record.scalars for record in self.runs.values()):
                title = f"{name.capitalize()} loss"
                drawn[f"{name}_loss"] = pictures.loss_curves(
                    title, self._curves(tag), self.band if tag == VALIDATION else None
                )
        if any(SECONDS in record.scalars for record in self.runs.values()):
            drawn["seconds"] = pictures.curves("Seconds per iteration", "s", self._curves(SECONDS))
        if with_traffic:
            drawn["traffic"] = pictures.traffic_bars(*list(with_traffic.items())[-1])
        errors = {
            f"{name}: {_place(match)}": record.curve(tag)
            for name, record in self.runs.items()
            for tag in record.scalars
            if (match := _COMPRESSION.fullmatch(tag)) and match["kind"] == "relative error"
        }
        if errors:
            drawn["errors"] = pictures.curves("What compression leaves out", "|left out| / |compressed|", errors)
        return drawn

    def _curves(self, tag: str) -> dict[str, Any]:
        return {name: record.curve(tag) for name, record in self.runs.items()}

    def _columns(self) -> tuple[str, ...]:
        return ("", *self.runs, *(["difference"] if len(self.runs) > 1 else []))

    def summary(self) -> dict[str, Any]:
        """In plain JSON values."""
        return {
            "final_validation_loss": {name: record.validation.last for name, record in self.runs.items()},
            "final_validation_loss_change": relative(self.last.validation.last, self.first.validation.last),
            "seconds_per_iteration": self.seconds(),
            "traffic_bytes_per_iteration": {s.name: asdict(s) | {"ratio": s.ratio} for s in shares(self.last)},
            "raw_equals_what_vanilla_sent": not self.complaints(),
            "complaints": self.complaints(),
        }


def _place(match: re.Match[str]) -> str:
    """Technique and stage; a log does not say the stage."""
    return ", ".join(filter(None, (match["technique"], match["stage"])))


def _row(name: str, values: Sequence[float], form: str) -> tuple[Cell, ...]:
    """The values, and how much the second is above the first; None for what is not known."""
    change = [relative(new, old) for old, new in pairwise(values)]
    texts = [*(format(value, form) for value in values), *(format(value, "+.2%") for value in change)]
    return name, *(None if number != number else text for number, text in zip([*values, *change], texts, strict=True))
