"""Tables of the paper's tables and figures, made from the logs in RESULTS/<experiment>/<model>-<variant>."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from optimus_cc_ext.tools.report.record import Record, read_logs
from optimus_cc_ext.tools.report.table import Cell, Table

MODELS = {"335m": "GPT-335M", "2.5b": "GPT-2.5B", "8.3b": "GPT-8.3B"}
VARIANTS = {
    "baseline": "Baseline",
    "cb-no-lep": "CB without LEP",
    "cb": "CB",
    "cb-lep": "CB+LEP",
    "cb-all": "CB, all messages",
    "cb-fe": "CB+FE",
    "cb-fe-sc": "CB+FE+SC",
}
"""Names of the variants in the paper, in the paper's order."""

PRETRAINING_ITERATIONS = 230_000
_SECONDS_A_DAY = 86_400
_LEAST_OF_MANY = 1000
"""Iterations of a run from which the days of all are told; a shorter one is a try."""


@dataclass(frozen=True)
class Run:
    """Run of an experiment, with the paper's names of model and variant."""

    model: str
    variant: str
    record: Record

    def last_traffic(self) -> dict[str, tuple[float, float]]:
        """Return (sent, raw) MB of each class in the last iteration that was logged."""
        names = [tag[11:-11] for tag in self.record.scalars if tag.endswith(" sent bytes")]
        return {name: (self.record.sent(name).last / 1e6, self.record.raw(name).last / 1e6) for name in names}

    def baseline(self, runs: "Sequence[Run]") -> "Run | None":
        """Return the run of the same model with which all variants are compared."""
        return next((run for run in runs if (run.model, run.variant) == (self.model, "Baseline")), None)

    def speedup(self, runs: "Sequence[Run]") -> float | None:
        """Return how many times faster the run is than the baseline."""
        base = self.baseline(runs)
        return base and base.record.seconds.median / self.record.seconds.median


TIMED = ("pipeline backward", "DP gradients")
"""The classes of traffic whose milliseconds figure 10 has."""


def read_runs(results: Path, experiment: str) -> list[Run]:
    """Read all runs of `experiment` that have a log with an iteration in it, in the paper's order."""
    places = {name: place for place, name in enumerate(VARIANTS)}
    runs = []
    for model, name in MODELS.items():
        folders = {path.name.removeprefix(f"{model}-"): path for path in (results / experiment).glob(f"{model}-*")}
        for variant in sorted(folders, key=lambda variant: (places.get(variant, len(places)), variant)):
            record = read_logs(folders[variant])
            if record.training.values:
                runs.append(Run(name, VARIANTS.get(variant, variant), record))
    return runs


def table2(runs: Sequence[Run]) -> Table:
    """Make table 2: perplexity, training time and speedup of pretraining."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        loss, seconds = run.record.validation.last, run.record.seconds.median
        sent, raw = (sum(part[side] for part in run.last_traffic().values()) for side in (0, 1))
        iterations = run.record.training.iterations[-1]
        days = PRETRAINING_ITERATIONS * seconds / _SECONDS_A_DAY if iterations >= _LEAST_OF_MANY else None
        rows.append((
            run.model, run.variant, iterations, loss, math.exp(loss), seconds, days, run.speedup(runs),
            100 * sent / raw if raw else None,
        ))  # fmt: skip
    return Table(
        ("model", "variant", "iterations", "validation loss", "validation perplexity", "s per iteration",
         f"days for {PRETRAINING_ITERATIONS:,} iterations", "speedup", "traffic sent, %"),
        rows, "Table 2: pretraining",
        "Seconds are the median over the iterations. Traffic: what is sent of what the baseline sends, all classes.",
        name="table2",
    )  # fmt: skip


def learning_curves(runs: Sequence[Run]) -> Table:
    """Make figure 9's table: every validation, with the training time up to it."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        seconds, validation = run.record.seconds, run.record.validation
        for iteration, loss in zip(validation.iterations, validation.values, strict=True):
            done = zip(seconds.iterations, seconds.values, strict=True)
            hours = sum(value for number, value in done if number <= iteration) / 3600
            rows.append((run.model, run.variant, iteration, hours, loss, math.exp(loss)))
    columns = ("model", "variant", "iteration", "training hours", "validation loss", "validation perplexity")
    return Table(columns, rows, name="figure9")


def figure10(runs: Sequence[Run]) -> Table:
    """Make figure 10's table: the time of an iteration, compression's part of it, and the traffic of each class."""
    classes = list(dict.fromkeys(name for run in runs for name in run.last_traffic()))
    rows = [
        (
            run.model, run.variant, 1e3 * run.record.seconds.median, run.speedup(runs),
            *(run.record.curve(f"optimus-cc/{tag} milliseconds").median for tag in TIMED),
            *(run.last_traffic().get(name, (None,))[0] for name in classes),
        )
        for run in runs
    ]  # fmt: skip
    return Table(
        ("model", "variant", "ms per iteration", "speedup", "CB, ms", "SC, ms", *(f"{name}, MB" for name in classes)),
        rows, "Figure 10: time of an iteration",
        "Medians over the iterations after the first. CB and SC: compressing and decompressing, on the stage where it"
        " takes longest; part of the iteration. MB: sent per iteration, all ranks together.",
        name="figure10",
    )  # fmt: skip


def figure11(runs: Sequence[Run]) -> tuple[Table, Table]:
    """Make figure 11's tables: every iteration and stage, and a summary by stage, of errors and activation
    differences.
    """
    tags = {
        "cosine": "error cosine", "mean error": "error mean", "mean activation difference": "activation difference mean"
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    summary: list[tuple[Cell, ...]] = []
    for run in runs:
        scalars = run.record.scalars
        for stage in sorted(int(tag.split()[-1]) for tag in scalars if tag.startswith("optimus-cc/error cosine/")):
            curves = [run.record.curve(f"optimus-cc/{tag}/stage {stage}") for tag in tags.values()]
            values = [curve.values for curve in curves]
            rows += [(run.model, i, stage, *each) for i, *each in zip(curves[0].iterations, *values, strict=True)]
            cosines, errors, differences = values
            summary.append((
                run.model, stage, len(cosines), mean(cosines), max(map(abs, cosines)), mean(errors), mean(differences)
            ))  # fmt: skip
    heads = ("model", "stage", "iterations", "mean cosine", "largest absolute cosine", *list(tags)[1:])
    title = "Figure 11: errors of compression against differences between activations"
    note = "Lazy error propagation rests on both being near 0: the cosine, and the average of the errors."
    every = Table(("model", "iteration", "stage", *tags), rows, name="figure11")
    return every, Table(heads, summary, title, note, name="figure11-summary")


def figure12(runs: Sequence[Run]) -> Table:
    """Make figure 12's table: peak memory of the rank with the largest peak."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        (peak, source), base = _peak(run), run.baseline(runs)
        more = 100 * (peak / _peak(base)[0] - 1) if base else None
        rows.append((run.model, run.variant, peak, more, run.record.largest("compression state MB"), source))
    return Table(
        ("model", "variant", "peak, MB", "more than baseline, %", "compression state, MB", "measured"), rows,
        "Figure 12: peak memory", "On the rank that takes most. MB of memory as Megatron counts them, 2^20 bytes.",
        name="figure12",
    )  # fmt: skip


def _peak(run: Run) -> tuple[float, str]:
    """Return the peak memory in MB and its source: the GPU if there is one, else the process."""
    allocated, resident = (run.record.largest(f"max {kind} MB") for kind in ("allocated", "resident"))
    if allocated > 0:  # without a GPU Megatron reports zeros
        return allocated, "GPU memory allocated"
    return resident, "CPU: resident memory of the process, libraries included" if resident > 0 else "not measured"


def figure14(path: Path) -> Table:
    """Read the table that figure14.py wrote; it has no rows if figure14.py has not been run."""
    return Table.read_csv(
        path, title="Figure 14: throughput of compression", name="figure14",
        note="Medians. Gbit/s of the gradient's slice, not of its factors; the paper's network carries 200.",
    )  # fmt: skip
