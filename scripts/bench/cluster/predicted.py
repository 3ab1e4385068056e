"""Comparison of the planner with shaped hosts: each variant's seconds over vanilla's at the same rate, measured and
planned.

    .venv/bin/python -m scripts.bench.cluster.predicted results/cluster

It reads the folder that `python -m scripts.bench.cluster --layouts pp2dp1,pp1dp2 --rates R1,R2,R3,none` has written.
The planner is given two times on unshaped links: vanilla's, for computation, and the variant's, for its compressors. It
predicts all else: the seconds on shaped links, and how many of them are hidden. Layouts of at most two hosts, with a
core for each, are judged; others are printed. Exit status 1: judged ratios are off by more than 10 % in the median or
20 % at worst.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.tools.plan.flags import job_of
from optimus_cc_ext.tools.plan.hardware import GPUS, Cluster, Network
from optimus_cc_ext.tools.plan.iteration import iteration
from optimus_cc_ext.tools.plan.measured import solved
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.traffic import DENSE
from optimus_cc_ext.tools.report.log_lines import stays_dense
from optimus_cc_ext.tools.report.table import Table
from scripts.bench.cluster.page import load
from scripts.bench.cluster.run import Run
from scripts.experiments.models import MODELS, Layout, Training
from scripts.experiments.variants import VANILLA
from scripts.hosts.network import UNSHAPED, bits_per_second

MEDIAN, WORST, HOSTS = 0.10, 0.20, 2
_PAYLOAD = 0.956
"""Share of payload in a shaped line's bits: 1448 of 1514 bytes of an Ethernet frame are TCP's payload."""

_EXCHANGE = 0.5
"""Share of a shaped line's rate in an exchange: gloo's messages both ways take as long as one after the other, because
acknowledgements queue behind data (tests/scripts/test_bench_cluster_network.py). All of 1F1B's messages but those of
warm-up and cooldown meet another one.
"""

_HOP = 60e-6
"""Seconds of a hop between two hosts; negligible beside the times here."""


@dataclass(frozen=True)
class Ratio:
    """Ratio of one variant's seconds to vanilla's, at one rate."""

    model: str
    layout: Layout
    variant: str
    rate: str
    block: int
    measured: float
    planned: float
    spread: float
    """Seconds between the slowest and the fastest iteration, over vanilla's seconds."""

    @property
    def error(self) -> float:
        """Relative error of the planned ratio against the measured one."""
        return self.planned / self.measured - 1

    @property
    def judged(self) -> bool:
        """True if each host had a core of its own."""
        return self.layout.hosts <= HOSTS


def job_in(training: Training, more: Sequence[str] = ()) -> Job:
    """Return the benchmark's training, with the flags `more` of a variant, as a job of the planner."""
    flags = [*training.flags(), *more, "--vocab-size", str(training.model.vocabulary), "--attention-backend", "unfused"]
    job, _ = job_of(flags, training.processes)
    return job.replace(precision="bf16" if training.layout.sharded else "fp32")


def cluster_of(layout: Layout, bits: float) -> Cluster:
    """Return hosts behind lines of `bits` per second; their speed of computing is fitted to measured seconds later."""
    line = Network(
        name="shaped", node_rate=bits / 8 * _PAYLOAD, hop=_HOP, rdma=False, scatters_twice=True,
        exchange_share=_EXCHANGE,
    )  # fmt: skip
    return Cluster(gpu=GPUS["A100"], network=line, gpus_per_node=layout.ranks_per_host)


def planned(
    training: Training, config: OptimusConfig, bits: float, vanilla_free: float, ours_free: float,
    flags: Sequence[str] = (),
) -> float:  # fmt: skip
    """Return a variant's seconds over vanilla's on lines of `bits` per second, from the seconds of both on
    unshaped links; `flags` are the variant's.
    """
    job, ours, layout = job_in(training), job_in(training, flags), training.layout
    free = cluster_of(layout, float("inf"))

    def vanilla_seconds(scale: float) -> float:
        return iteration(replace(free, software_scale=scale), job).seconds

    computes = replace(free, software_scale=solved(vanilla_seconds, vanilla_free))

    def our_seconds(scale: float) -> float:
        return iteration(replace(computes, coding_scale=scale), ours, config).seconds

    codes = replace(computes, coding_scale=solved(our_seconds, ours_free))
    shaped = replace(codes, network=cluster_of(layout, bits).network)
    return iteration(shaped, ours, config).seconds / iteration(shaped, job, DENSE).seconds


def ratios(runs: Sequence[Run]) -> list[Ratio]:
    """Return all ratios that can be compared: the same model, layout and block has runs of vanilla and on unshaped
    links.
    """
    grouped = _grouped(runs)
    seconds = {key: statistics.median(values) for key, values in grouped.items()}
    choices = {
        (run.model, run.layout, run.block, run.variant, each.rate): (run.flags, any(map(stays_dense, run.trial)))
        for run in runs for each in run.iterations if each.measured
    }  # fmt: skip
    found = []
    for (model, layout, block, variant, rate), ours in seconds.items():
        here = model, layout, block
        needed = [(*here, VANILLA, rate), (*here, VANILLA, UNSHAPED), (*here, variant, UNSHAPED)]
        if variant == VANILLA or rate == UNSHAPED or not all(key in seconds for key in needed):
            continue
        vanilla, vanilla_free, ours_free = (seconds[key] for key in needed)
        training = Training(model=MODELS[model], layout=Layout.parsed(layout))
        flags, dense = choices[*here, variant, rate]
        if dense != choices[*here, variant, UNSHAPED][1]:
            continue  # this variant's compressors were not measured
        config = DENSE if dense else training.config_of(flags, ignore_others=True)
        ratio = planned(training, config, bits_per_second(rate), vanilla_free, ours_free, flags)
        each = grouped[*here, variant, rate]
        spread = (max(each) - min(each)) / vanilla
        found.append(Ratio(model, training.layout, variant, rate, block, ours / vanilla, ratio, spread))
    return found


def order(found: Sequence[Ratio]) -> tuple[int, int]:
    """Return (right, all) pairs of variants whose order is planned rightly.

    Counted are pairs of one layout, rate and block whose seconds differ by more than their spread.
    """
    right = count = 0
    for one, other in combinations(found, 2):
        same = (one.model, one.layout, one.rate, one.block) == (other.model, other.layout, other.rate, other.block)
        told = one.planned != other.planned  # variants with equal plans send the same bytes on this layout
        if same and told and abs(one.measured - other.measured) > max(one.spread, other.spread):
            count += 1
            right += (one.measured < other.measured) == (one.planned < other.planned)
    return right, count


def _grouped(runs: Sequence[Run]) -> dict[tuple[str, str, int, str, str], list[float]]:
    found: dict[tuple[str, str, int, str, str], list[float]] = {}
    for run in runs:
        for each in run.iterations:
            if each.measured:
                found.setdefault((run.model, run.layout, run.block, run.variant, each.rate), []).append(each.seconds)
    return found


def table(found: Sequence[Ratio]) -> Table:
    """Return the table of all ratios, judged ones first."""
    rows = [
        (r.model, str(r.layout), r.rate, r.variant, r.block, r.measured, r.planned, 100 * r.error,
         "yes" if r.judged else "")
        for r in sorted(found, key=lambda r: (not r.judged, str(r.layout), bits_per_second(r.rate), r.variant))
    ]  # fmt: skip
    columns = ("model", "layout", "rate", "variant", "block", "measured", "planned", "error %", "judged")
    return Table(columns, rows, title="Seconds over vanilla's")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.cluster.predicted", description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        _, runs = load(parser.parse_args(argv).folder)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = ratios(runs)
    print(table(found).markdown())
    judged = [abs(ratio.error) for ratio in found if ratio.judged]
    right, pairs = order([ratio for ratio in found if ratio.judged])
    if not judged:
        print(
            "nothing to judge: give runs of pp2dp1 or pp1dp2 with vanilla, on unshaped links (none) and others",
            file=sys.stderr,
        )
        return 1
    print(
        f"judged: {len(judged)}, median {statistics.median(judged):.1%}, worst {max(judged):.1%}; "
        f"order right in {right} of {pairs} pairs that differ by more than their spread"
    )
    return 0 if statistics.median(judged) <= MEDIAN and max(judged) <= WORST else 1


if __name__ == "__main__":
    sys.exit(main())
