"""Tables of the runs' records, as pure functions."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.config.trials import on_trial
from optimus_cc_ext.metrics.traffic import BETWEEN_NODES
from optimus_cc_ext.tools.report.table import Cell, Table
from scripts.bench.cluster.run import Iteration, Run
from scripts.experiments.models import MODELS, Layout, Training
from scripts.experiments.variants import VANILLA
from scripts.hosts.network import UNSHAPED, bits_per_second

BOUND = "bound of "
"""Prefix of a variant's name for a run that shows what its bytes take without any work: vanilla on links that are
faster by as much as the bytes are fewer, or the variant with free coding.
"""

ALL = "all"
"""Name of all blocks together, in place of a block's number."""

_TIMES = (
    "model", "layout", "rate", "variant", "block", "seconds", "lower quartile", "upper quartile", "measured", "exposed",
    "over vanilla", "recovered", "bound", "recovered of bound", "loss",
)  # fmt: skip
_PAIRED = ("model", "layout", "rate", "variant", "over", "blocks", "ratio", "95 % from", "95 % to")
_TRAFFIC = (
    "model", "layout", "variant", *(f"{each.tag}, MB" for each in CLASSES), "metrics, MB", "uncompressed, MB",
    "kernel, MB", "kernel over metrics", "segments sent again",
)  # fmt: skip


def share_recovered(vanilla: float, ours: float, unshaped: float) -> float | None:
    """Return (vanilla - ours) / (vanilla - unshaped), seconds each; None if the links cost vanilla nothing."""
    return (vanilla - ours) / (vanilla - unshaped) if vanilla > unshaped else None


def times(runs: Sequence[Run]) -> Table:
    """Return a row for each variant at each rate, slow links last: all blocks together, then, if there are
    several, each.
    """
    rows: list[tuple[Cell, ...]] = []
    for runs_of_model in _grouped(runs):
        blocks = sorted({run.block for run in runs_of_model})
        rows += _times(runs_of_model, ALL)
        for block in blocks if len(blocks) > 1 else ():
            rows += _times([run for run in runs_of_model if run.block == block], block)
    note = (
        "Seconds of an iteration: medians. Exposed: seconds above those of vanilla on unshaped links. Recovered: the"
        " share of vanilla's exposed seconds that is gone. Bound: the share that is gone if the variant's bytes"
        " took no work (vanilla on faster links, or the variant with free coding)."
    )
    return Table(_TIMES, rows, note=note)


def _times(runs: Sequence[Run], block: Cell) -> Iterator[tuple[Cell, ...]]:
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    at: dict[tuple[str, str], dict[int, Run]] = defaultdict(dict)
    for run in runs:
        for each in run.iterations:
            if each.measured:
                seconds[run.variant, each.rate].append(each.seconds)
                at[run.variant, each.rate][id(run)] = run
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    unshaped = medians.get((VANILLA, UNSHAPED))
    common = min(len(run.iterations) for run in runs if not run.variant.startswith(BOUND))
    shown = [key for key in seconds if not key[0].startswith(BOUND)]
    for variant, rate in sorted(shown, key=lambda key: -bits_per_second(key[1])):
        values, ours, mine = seconds[variant, rate], medians[variant, rate], list(at[variant, rate].values())
        vanilla = None if variant == VANILLA else medians.get((VANILLA, rate))
        recovered = bound = None
        if vanilla and unshaped and rate != UNSHAPED:
            recovered = share_recovered(vanilla, ours, unshaped)
            fastest = medians.get((BOUND + variant, rate))
            bound = share_recovered(vanilla, fastest, unshaped) if fastest else None
        lower, _, upper = statistics.quantiles(values * 2 if len(values) == 1 else values, n=4, method="inclusive")
        yield (
            mine[0].model, mine[0].layout, rate, variant, block, ours, lower, upper, len(values),
            unshaped and ours - unshaped, vanilla and ours / vanilla, recovered, bound,
            recovered / bound if recovered is not None and bound else None, mine[0].iterations[common - 1].loss,
        )  # fmt: skip


def paired(runs: Sequence[Run]) -> Table:
    """Return each variant's seconds over those of the first variant in the same block: the median over the blocks, and
    the interval of order statistics that holds it in at least 95 % of cases; no interval of fewer than 6 blocks.
    """
    rows: list[tuple[Cell, ...]] = []
    for of_model in _grouped(runs):
        seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        for run in of_model:
            for each in run.iterations:
                if each.measured and not run.variant.startswith(BOUND):
                    seconds[run.variant, each.rate, run.block].append(each.seconds)
        medians, first = {key: statistics.median(values) for key, values in seconds.items()}, of_model[0].variant
        for variant, rate in dict.fromkeys(key[:2] for key in medians if key[0] != first):
            blocks = [block for name, at, block in medians if (name, at) == (variant, rate)]
            ratios = sorted(
                medians[variant, rate, block] / medians[first, rate, block]
                for block in blocks if (first, rate, block) in medians
            )  # fmt: skip
            if ratios:
                cut = _outside(len(ratios))
                both = (None, None) if cut is None else (ratios[cut], ratios[-1 - cut])
                one = of_model[0].model, of_model[0].layout
                rows.append((*one, rate, variant, first, len(ratios), statistics.median(ratios), *both))
    note = "Ratios of medians, block by block: their median, and the interval that holds it in at least 95 % of cases."
    return Table(_PAIRED, rows, note=note)


def _outside(count: int) -> int | None:
    """Return how many of `count` sorted values may be left out at each end of an interval that holds the median in at
    least 95 % of cases; None if even the whole range does not.
    """
    below = [sum(math.comb(count, k) for k in range(cut + 1)) / 2**count for cut in range(count // 2)]
    return sum(each <= 0.025 for each in below) - 1 if below and below[0] <= 0.025 else None


def payload(counted: Sequence[Iteration]) -> float:
    """Return the bytes of an iteration on all hosts, by the kernel's counters."""
    # The mean, not the median: some bytes of one iteration are counted in the next one, and a median would omit them.
    return statistics.mean(sum(each.payload) for each in counted)


def traffic(runs: Sequence[Run]) -> Table:
    """Return the bytes of an iteration, by the metrics and by the kernel, at all rates together: they do not depend on
    the rate.

    Each run counts from its first measured iteration on: before it connections are made, and the package probes the
    links with bytes that its metrics do not count. Medians, because a log line that is read late moves bytes from one
    iteration to the next.
    """
    rows: list[tuple[Cell, ...]] = []
    for runs_of_model in _grouped(runs):
        for variant in dict.fromkeys(run.variant for run in runs_of_model if not run.variant.startswith(BOUND)):
            counted = [each for run in runs_of_model if run.variant == variant for each in _after_warm_up(run)]
            if counted:
                both = [[each.traffic.get(traffic.tag, (0.0, 0.0)) for each in counted] for traffic in CLASSES]
                sent, raw = (
                    [statistics.median(each[side] for each in pairs) / 1e6 for pairs in both] for side in (0, 1)
                )
                kernel = payload(counted) / 1e6
                again = statistics.mean(each.retransmitted for each in counted)
                # With several ranks on a host, only a part of the classes' bytes leaves it.
                leaving = statistics.median(each.traffic.get(BETWEEN_NODES, (0.0,))[0] for each in counted) / 1e6
                ratio = kernel / (leaving or sum(sent)) if sum(sent) else None
                one = runs_of_model[0]
                rows.append((one.model, one.layout, variant, *sent, sum(sent), sum(raw), kernel, ratio, again))
    note = "An iteration, all hosts. Kernel: its counters, without Ethernet, IP and TCP headers."
    return Table(_TRAFFIC, rows, note=note)


def _after_warm_up(run: Run) -> list[Iteration]:
    """Return the iterations from the first measured one on. A run's last iteration may lack the metrics' traffic."""
    first = next((place for place, each in enumerate(run.iterations) if each.measured), len(run.iterations))
    return [each for each in run.iterations[first:] if each.traffic]


def chooses_by_the_links(flags: Sequence[str], layout: Layout, model: str) -> bool:
    """Return whether a variant measures at its start whether it compresses."""
    config = Training(layout=layout, model=MODELS[model]).config_of(flags, ignore_others=True)
    return bool(on_trial(config))


def losses_agree(runs: Sequence[Run]) -> bool:
    """Return whether runs of the same variant computed exactly the same losses: their seed and data are the same.

    A variant that chooses by the links does not choose the same everywhere, so its runs are not compared.
    """
    known: dict[tuple[str, str, str, int], float] = {}
    return all(
        known.setdefault((run.model, run.layout, run.variant, each.number), each.loss) == each.loss
        for run in runs
        if not chooses_by_the_links(run.flags, Layout.parsed(run.layout), run.model)
        for each in run.iterations
    )


def _grouped(runs: Iterable[Run]) -> list[list[Run]]:
    """Return the runs of each model and layout."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.model, run.layout].append(run)
    return list(groups.values())
