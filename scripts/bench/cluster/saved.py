"""Seconds that a variant's bytes save on shaped links, beside what the saved bytes alone would take.

    python -m scripts.bench.cluster --layouts pp1dp2z1 --variants vanilla,gather-exact --bound coding --output DIR
    python -m scripts.bench.cluster.saved DIR

The ratio is (vanilla's seconds - the variant's with free coding) / (bytes saved on the busiest host / the rate), of
each block. It is 1 if fewer bytes take less time by as much as the link is slow.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.report.table import Cell, Table
from scripts.bench.cluster.page import load
from scripts.bench.cluster.results import BOUND
from scripts.bench.cluster.run import Run
from scripts.experiments.variants import VANILLA
from scripts.hosts.network import UNSHAPED, bits_per_second


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.cluster.saved", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="the benchmark's --output")
    options = parser.parse_args(argv)
    return run_command(lambda: print(table(load(options.folder)[1]).markdown()) or 0, "nothing was written")


def table(runs: Sequence[Run]) -> Table:
    """Return a row for each variant, rate and block, and one for each variant and rate with the medians."""
    rows: list[tuple[Cell, ...]] = []
    known = {(run.model, run.layout, run.variant, run.block): run for run in runs}
    for model, layout, variant in dict.fromkeys(key[:3] for key in known if not key[2].startswith(BOUND)):
        measured = {each.rate for key, run in known.items() if key[:3] == (model, layout, variant)
                    for each in run.iterations if each.measured}  # fmt: skip
        for rate in sorted(measured - {UNSHAPED}, key=bits_per_second):
            found: list[tuple[float, ...]] = []
            for block in sorted({run.block for run in runs}):
                three = [known.get((model, layout, name, block)) for name in (VANILLA, variant, BOUND + variant)]
                if None not in three and variant != VANILLA:
                    found.append(_of_block([run for run in three if run is not None], rate))
                    rows.append((model, layout, variant, rate, block, *found[-1]))
            if found:
                medians = map(statistics.median, zip(*found, strict=True))
                rows.append((model, layout, variant, rate, "median", *medians))
    columns = ("model", "layout", "variant", "rate", "block", "vanilla, s", "coded, s", "free, s", "saved, MB", "ratio")
    return Table(columns, rows, "Saved seconds", __doc__.rpartition("\n\n")[2].strip())


def _of_block(three: Sequence[Run], rate: str) -> tuple[float, ...]:
    """Return the seconds of vanilla, of the variant and of its free coding, the saved bytes and the ratio."""
    at_rate = [[each for each in run.iterations if each.measured and each.rate == rate] for run in three]
    seconds = [statistics.median(each.seconds for each in iterations) for iterations in at_rate]
    # Means over all measured iterations of the rate, because some bytes of one are counted in the next.
    hosts = [[statistics.mean(host) for host in zip(*(each.payload for each in iterations), strict=True)]
             for iterations in at_rate]  # fmt: skip
    saved = max(hosts[0]) - max(hosts[1])
    ratio = (seconds[0] - seconds[2]) / (8 * saved / bits_per_second(rate))
    return (*seconds, saved / 1e6, ratio)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
