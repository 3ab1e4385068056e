"""The arithmetic behind the tables: pure functions of what the runs recorded."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster_bound import bound_share, chooses_by_the_links, chosen_stages, config_of
from cluster_model import MODELS, VANILLA, parse_layout
from cluster_network import UNSHAPED, bits_per_second
from cluster_run import Iteration, Run

__all__ = [
    "Row",
    "Spread",
    "drift",
    "kernel_to_metrics",
    "losses_agree",
    "ratio_to_vanilla",
    "rows",
    "share_recovered",
]


@dataclass(frozen=True)
class Spread:
    """Seconds per iteration: median and quartiles."""

    median: float
    lower: float
    upper: float
    count: int


@dataclass(frozen=True)
class Row:
    """One variant at one rate, all blocks together."""

    model: str
    layout: str
    variant: str
    rate: str
    techniques: str
    seconds: Spread
    block_seconds: dict[int, float]
    """Block to the median in it."""

    exposed: float | None
    """Seconds above those of vanilla on unshaped links."""

    recovered: float | None
    """(vanilla - ours) / (vanilla - unshaped vanilla); None for vanilla, and where nothing is exposed."""

    recovered_by_block: dict[int, float]
    bound: float | None
    """The same share as the schedule would have it with these flags' bytes, and compression for nothing."""

    to_vanilla: float | None
    """Time over vanilla's at this rate."""

    to_vanilla_by_block: dict[int, float]
    payload_by_host: list[float]
    """Bytes an iteration by the kernel's counters, without Ethernet, IP and TCP headers: medians, because a log line
    that is read late moves bytes from one iteration to the next."""

    sent_by_host: list[float]
    """The same with them."""

    traffic: dict[str, tuple[float, float]]
    """Class to (sent, raw) bytes an iteration of all ranks, by the metrics."""

    kernel_to_metrics: float | None
    """Payload of all hosts over the metrics' sum, in all iterations of these runs after their warm-up."""

    retransmitted: float
    """TCP segments an iteration of all hosts."""

    loss: float
    """Training loss of the last iteration that all runs of this model and layout have."""

    loss_iteration: int


def spread(seconds: Sequence[float]) -> Spread:
    """Median and quartiles; of a single value, three times that value."""
    if len(seconds) == 1:
        return Spread(seconds[0], seconds[0], seconds[0], 1)
    lower, middle, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(middle, lower, upper, len(seconds))


def share_recovered(vanilla: float, ours: float, unshaped: float) -> float | None:
    """(vanilla - ours) / (vanilla - unshaped), seconds each; None where the links cost vanilla nothing."""
    return (vanilla - ours) / (vanilla - unshaped) if vanilla > unshaped else None


def rows(runs: Iterable[Run]) -> list[Row]:
    """One row for each model, layout, variant and rate that was measured, in the order of the runs, slow links last."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.model, run.layout), []).append(run)
    return [row for group in groups.values() for row in _group(group)]


def _group(runs: Sequence[Run]) -> list[Row]:
    """Of one model on one layout."""
    cells: dict[tuple[str, str], list[tuple[Run, Iteration]]] = {}
    for run in runs:
        for each in run.iterations:
            if each.measured:
                cells.setdefault((run.variant, each.rate), []).append((run, each))
    common = min(len(run.iterations) for run in runs)
    medians = {key: spread([each.seconds for _, each in cell]).median for key, cell in cells.items()}
    by_block = {key: _by_block(cell) for key, cell in cells.items()}
    payloads = {key: _median_by_host([each.payload for _, each in cell]) for key, cell in cells.items()}

    def row(variant: str, rate: str) -> Row:
        key, vanilla, unshaped = (variant, rate), (VANILLA, rate), (VANILLA, UNSHAPED)
        cell = cells[key]
        compared = variant != VANILLA and vanilla in cells
        recovered = bound = None
        recovered_by_block: dict[int, float] = {}
        if compared and rate != UNSHAPED and unshaped in cells:
            recovered = share_recovered(medians[vanilla], medians[key], medians[unshaped])
            if recovered is not None:
                # Of every run its own: what each has chosen differs.
                runs_here = {id(run): run for run, _ in cell}.values()
                bound = statistics.mean(_bound(run, rate, medians[unshaped]) for run in runs_here)
            recovered_by_block = _shares(by_block[vanilla], by_block[key], by_block[unshaped])
        traffic = _mean_traffic([each.traffic for _, each in cell])
        return Row(
            model=cell[0][0].model, layout=cell[0][0].layout, variant=variant, rate=rate,
            techniques=cell[0][0].techniques,
            seconds=spread([each.seconds for _, each in cell]), block_seconds=by_block[key],
            exposed=medians[key] - medians[unshaped] if unshaped in medians else None,
            recovered=recovered, recovered_by_block=recovered_by_block, bound=bound,
            to_vanilla=medians[key] / medians[vanilla] if compared else None,
            to_vanilla_by_block=ratio_to_vanilla(by_block[vanilla], by_block[key]) if compared else {},
            payload_by_host=payloads[key], sent_by_host=_median_by_host([each.sent for _, each in cell]),
            traffic=traffic, kernel_to_metrics=kernel_to_metrics({id(run): run for run, _ in cell}.values()),
            retransmitted=statistics.mean(each.retransmitted for _, each in cell),
            loss=cell[0][0].iterations[common - 1].loss, loss_iteration=common,
        )  # fmt: skip

    variants = list(dict.fromkeys(variant for variant, _ in cells))
    rates = sorted({rate for _, rate in cells}, key=bits_per_second, reverse=True)
    return [row(variant, rate) for rate in rates for variant in variants if (variant, rate) in cells]


def _bound(run: Run, rate: str, unshaped: float) -> float:
    """Of a rate at which vanilla was measured to lose time; where the simulation has it lose none: 0."""
    layout = parse_layout(run.layout)
    share = bound_share(
        MODELS[run.model], layout, config_of(run.flags, layout), chosen_stages(run.forecast),
        bits=bits_per_second(rate), unshaped=unshaped,
    )  # fmt: skip
    return share or 0.0


def ratio_to_vanilla(vanilla: Mapping[int, float], ours: Mapping[int, float]) -> dict[int, float]:
    """Block to the ratio of the times in it: what drifts from block to block drops out."""
    return {block: seconds / vanilla[block] for block, seconds in ours.items() if block in vanilla}


def drift(run: Run) -> dict[str, float]:
    """Rate to how much slower its second half of measurements was than its first: 0.02 is 2 %."""
    found = {}
    for rate in {each.rate for each in run.iterations if each.measured}:
        seconds = [each.seconds for each in run.iterations if each.measured and each.rate == rate]
        half = len(seconds) // 2
        if half:
            found[rate] = statistics.median(seconds[-half:]) / statistics.median(seconds[:half]) - 1
    return found


def kernel_to_metrics(runs: Iterable[Run]) -> float | None:
    """Payload by the kernel over bytes by the metrics, from each run's first measured iteration on.

    Before that connections are made, and the package tries the links with bytes that its metrics do not count.
    Medians, over all rates, because a log line that is read late moves bytes from one iteration to the next.
    """
    counted: list[Iteration] = []
    for run in runs:
        first = next((place for place, each in enumerate(run.iterations) if each.measured), len(run.iterations))
        counted += [each for each in run.iterations[first:] if each.traffic]
    if not counted:
        return None
    metrics = statistics.median(sum(sent for sent, _ in each.traffic.values()) for each in counted)
    return sum(_median_by_host([each.payload for each in counted])) / metrics if metrics else None


def losses_agree(runs: Sequence[Run]) -> bool:
    """Whether runs that do the same computed the very same losses: seed and data are the same.

    A variant that chooses by the links does not choose the same everywhere, so its runs are not compared.
    """
    known: dict[tuple[str, str, str], dict[int, float]] = {}
    agree = True
    for run in runs:
        if chooses_by_the_links(run.flags, parse_layout(run.layout)):
            continue
        losses = known.setdefault((run.model, run.layout, run.variant), {})
        for each in run.iterations:
            agree &= losses.setdefault(each.number, each.loss) == each.loss
    return agree


def _by_block(cell: Sequence[tuple[Run, Iteration]]) -> dict[int, float]:
    blocks: dict[int, list[float]] = {}
    for run, each in cell:
        blocks.setdefault(run.block, []).append(each.seconds)
    return {block: statistics.median(seconds) for block, seconds in sorted(blocks.items())}


def _shares(
    vanilla: Mapping[int, float], ours: Mapping[int, float], unshaped: Mapping[int, float]
) -> dict[int, float]:  # fmt: skip
    shares = {
        block: share_recovered(vanilla[block], seconds, unshaped[block])
        for block, seconds in ours.items()
        if block in vanilla and block in unshaped
    }
    return {block: share for block, share in shares.items() if share is not None}


def _median_by_host(values: Sequence[Sequence[int]]) -> list[float]:
    return [statistics.median(host) for host in zip(*values, strict=True)]


def _mean_traffic(counted: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Means over the iterations that have an account; the last of a run may be without."""
    counted = [each for each in counted if each]
    names = dict.fromkeys(name for each in counted for name in each)
    return {
        name: (
            statistics.mean(each.get(name, (0.0, 0.0))[0] for each in counted),
            statistics.mean(each.get(name, (0.0, 0.0))[1] for each in counted),
        )
        for name in names
    }
