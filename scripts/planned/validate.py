"""Validation of the planner against published iteration times.

    python -m scripts.planned.validate [FILE.csv] [--format table|csv|json]

The rows are those of `tools/plan/published.py` and, for today's models, of recipes.csv beside this file; or those of
FILE.csv, which has the columns of public_timings.csv. The exit status is 1 if errors are too large or rows were left
out.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.published import DEEPSPEED, SHIPPED, SMALL, Row, read_rows, shipped
from optimus_cc_ext.tools.report.table import Table, printed
from scripts.planned.recipes import Judged, configurations, judged

MEDIAN, NINETIETH = 0.08, 0.20
"""The median error, and the error of nine of ten rows, that a campaign without a software scale may have."""

CALCULON = {"Nar-T2": "8.9 / 11.0", "vTrain": "8.2 / 192", "BLOOM": "29 / 35 and 26 / 35", "MT-NLG": "29 / 31"}
"""Calculon's median and largest error in %, on the rows of the shipped file."""

EQUAL = 0.03
"""Relative difference of planned seconds below which two layouts count as equally fast."""

DRAWN = 3


@dataclass(frozen=True)
class Campaign:
    """Relative errors of one campaign's held-out rows; for a scaled campaign, over all draws of the rows that give the
    scale.
    """

    name: str
    scale: str
    """Description of the scale; empty: the campaign was not scaled."""

    errors: tuple[tuple[Row, float], ...]

    @property
    def sizes(self) -> list[float]:
        """The absolute errors in ascending order."""
        return sorted(abs(error) for _, error in self.errors)

    @property
    def median(self) -> float:
        """The median of the absolute errors."""
        return median(self.sizes)

    @property
    def ninetieth(self) -> float:
        """The error that nine of ten rows do not exceed."""
        return self.sizes[math.ceil(0.9 * len(self.sizes)) - 1]

    @property
    def good(self) -> bool:
        """True if the errors are within `MEDIAN` and `NINETIETH`; always true for scaled campaigns."""
        return bool(self.scale) or (self.median <= MEDIAN and self.ninetieth <= NINETIETH)

    @property
    def worst(self) -> str:
        """Names and errors of the three rows with the largest errors."""
        last = {row.model: error for row, error in sorted(self.errors, key=lambda item: abs(item[1]))}
        return ", ".join(f"{model} {100 * error:+.0f} %" for model, error in list(last.items())[:-4:-1])


def campaigns(rows: Sequence[Row]) -> list[Campaign]:
    """Return the campaigns in the order of the file, without fitted rows unless a campaign has only such rows."""
    found = []
    for name in dict.fromkeys(row.campaign for row in rows):
        ratios = [(row, row.ratio()) for row in rows if row.campaign == name]
        text, by = "", 1.0
        if name.startswith(DEEPSPEED):
            count = DRAWN if len(ratios) > DRAWN else 1
            text = f"from {count} row{'s' * (count > 1)}, all {math.comb(len(ratios), count)} draws"
            errors = [
                (row, ratio / _typical(ratios[i][1] for i in drawn) - 1)
                for drawn in combinations(range(len(ratios)), count)
                for place, (row, ratio) in enumerate(ratios)
                if place not in drawn
            ]
        else:
            if name.startswith("MLPerf"):
                # If a file lacks small runs of its MLPerf round, those of the shipped file give the scale.
                small = [row for row, _ in ratios if row.small_mlperf] or [
                    row for row in shipped() if row.campaign == name and row.small_mlperf
                ]
                by = _typical(row.ratio() for row in small)
                text = f"{1 / by:.3f}, its rows of <= {SMALL} GPUs"
            errors = [(row, ratio / by - 1) for row, ratio in ratios if not row.fitted]
        if errors:
            found.append(Campaign(name, text, tuple(errors)))
    return found


def _typical(ratios: Iterable[float]) -> float:
    """Return the geometric mean of `ratios`; 1 if there are none."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(fmean(logs)) if logs else 1.0


def regrets(rows: Sequence[Row]) -> list[tuple[str, int, float, str, str, float]]:
    """Return, for each model that was run in several layouts on equally many GPUs: its name, the number of layouts, the
    relative excess of the chosen layout over the best one, the chosen layout, the best one, and the mean excess of all
    layouts that are planned within `EQUAL` of the chosen one. No constant was fitted on rows of vTrain and BLOOM.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        model, job = row.job.model, row.job
        groups.setdefault((row.campaign, model.layers, model.hidden, job.gpus, job.batch), []).append(row)
    found = []
    for (campaign, *_), alike in groups.items():
        if len({(row.job.tp, row.job.pp, row.job.micro_batch) for row in alike}) > 1:
            chosen = min(alike, key=lambda row: row.ratio() * row.seconds)
            best = min(alike, key=lambda row: row.seconds)
            name = f"{campaign}, {best.model.split()[0]}"
            equal = [
                row.seconds for row in alike
                if row.ratio() * row.seconds <= (1 + EQUAL) * chosen.ratio() * chosen.seconds
            ]  # fmt: skip
            excess = [seconds / best.seconds - 1 for seconds in (chosen.seconds, fmean(equal))]
            found.append((name, len(alike), excess[0], chosen.model, best.model, excess[1]))
    return found


def validation(rows: Sequence[Row], found: Sequence[Campaign]) -> list[Table]:
    """Return the errors by campaign, the regrets by model, and the errors of large runs on H100s."""
    errors = Table(
        ("campaign", "rows", "median %", "90 % within %", "largest %", "bias %", "scale", "Calculon", "", "worst"),
        [
            (
                c.name, len({row.line for row, _ in c.errors}), 100 * c.median, 100 * c.ninetieth, 100 * c.sizes[-1],
                100 * fmean(error for _, error in c.errors), c.scale or "none",
                next((text for name, text in CALCULON.items() if c.name.startswith(name)), None),
                "" if c.scale else "good" if c.good else "TOO FAR", c.worst,
            )
            for c in found
        ],
        title="Held-out rows: predicted against published seconds per iteration",
        note="Without a scale: median <= 8 %, nine of ten within 20 %. Calculon: its median / largest, as shipped.",
    )  # fmt: skip
    layouts = Table(
        ("model", "layouts", "regret %", "mean of equals %", "chosen", "best"),
        [
            (name, count, 100 * regret, 100 * equals, chosen, best)
            for name, count, regret, chosen, best, equals in regrets(rows)
        ],
        title="The layout that it would choose",
        note=f"Regret: published seconds of the chosen layout over those of the best. Equals are planned within "
        f"{100 * EQUAL:g} % of the chosen one.",
    )
    sizes = {
        "4,096 GPUs and more": [
            abs(e) for c in found for row, e in c.errors if row.cluster.gpu.name == "H100" and row.job.gpus >= 4096
        ],
        "MLPerf as one campaign, no scale": [
            abs(row.ratio() - 1) for row in rows if row.campaign.startswith("MLPerf") and not row.fitted
        ],
    }
    on_h100 = Table(
        ("held-out runs", "rows", "median %", "largest %"),
        [(name, len(each), 100 * median(each), 100 * max(each)) for name, each in sizes.items() if each],
        title="H100",
    )
    return [errors, *(table for table in (layouts, on_h100) if table.rows)]


def recipes(found: Sequence[Judged]) -> Table:
    """Return the errors on today's models, by configuration."""
    mixtures = [each for each in found if each.by_rate_of_kind is not None and each.configuration.modelled]
    ours, theirs, alike = (
        100 * median(abs(error) for error in errors)
        for errors in (
            [each.error for each in mixtures],
            [each.by_rate for each in mixtures],
            [each.by_rate_of_kind or 0.0 for each in mixtures],
        )
    )
    return Table(
        ("configuration", "releases", "spread %", "published s", "error %", "constant TFLOP/s %", "of mixtures %"),
        [
            (
                each.configuration.name, len(each.configuration.seconds), 100 * each.configuration.spread,
                each.configuration.published, 100 * each.error, 100 * each.by_rate,
                None if each.by_rate_of_kind is None else 100 * each.by_rate_of_kind,
            )
            for each in found
        ],
        title="Today's models on H100s: each predicted without rows of its own model",
        note=f"Median error of the mixtures: {ours:.1f} %; by one rate in TFLOP/s for all models {theirs:.1f} %, by "
        f"one for mixtures {alike:.1f} %. One constant is fitted, on the other mixtures; dense models have none. A "
        "spread is the slowest release over the fastest; the newest one is predicted. DeepEP is not modelled: it is "
        "planned as HybridEP, and left out of the medians and of every fit.",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 0, 1 (errors are too large, or rows were left out) or 2 (bad input)."""
    parser = argparse.ArgumentParser(prog="python -m scripts.planned.validate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("rows", nargs="?", type=Path, metavar="FILE.csv")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table")
    options = parser.parse_args(argv)
    return run_command(lambda: _validate(options.rows, options.format))


def _validate(given: Path | None, form: str) -> int:
    rows, left_out = list[Row](), list[str]()
    for path in [given] if given else SHIPPED:
        more, without = read_rows(path)
        rows += more
        left_out += [f"{path}: {reason}" for reason in without]
    if not rows:
        raise PlanError("; ".join(left_out))
    found, shown = campaigns(rows), list[Table]()
    if given is None:
        today, not_modelled = configurations()
        shown = [recipes(judged(today))]
        for reason in not_modelled:
            print(f"not judged: {reason}", file=sys.stderr)
    print(printed([*validation(rows, found), *shown], form), end="")
    for reason in left_out:
        print(f"error: row left out: {reason}", file=sys.stderr)
    return 0 if not left_out and all(campaign.good for campaign in found) else 1


if __name__ == "__main__":
    sys.exit(main())
