"""Train scaled-down lines of Megatron-LM's functional tests, vanilla and with `balanced`, and print both losses.

    scripts/compat_train.sh CHECKOUT [--lines 24] [--ranks 8] [--only TEXT] [--limit SECONDS] [--results FOLDER]

The lines are spread evenly over the layouts. A line that fails in vanilla is replaced by the next layout. Gradients are
compressed without a trial, which on one machine would leave them dense.
"""

import argparse
import importlib.metadata
import json
import os
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.compat import cpu_attention
from scripts.compat.forks import run_forks
from scripts.compat.lines import training_lines
from scripts.compat.small_lines import SmallLine, distinct_layouts

BALANCED = ("--optimus-cc", "balanced", "--no-compression-trial")
TOLERANCE = 0.02
"""Largest relative difference between the last losses."""

_LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")


@dataclass(frozen=True)
class Trained:
    """Finished run of one line."""

    case: str
    layout: tuple[str, ...]
    ranks: int
    balanced: bool
    loss: float | None
    """The last loss; None: the run failed."""

    reason: str = ""
    traffic: dict[str, list[int]] = field(default_factory=dict)
    """Bytes of all ranks by class of traffic: vanilla's, and those sent."""

    @property
    def compressed(self) -> list[str]:
        """The classes whose messages became smaller."""
        return [name for name, (raw, sent) in self.traffic.items() if sent < raw]


def train(line: SmallLine, balanced: bool, limit: float) -> Trained:
    """Train a line on forks of this process."""
    with tempfile.TemporaryDirectory(prefix="compat-train-") as folder:
        here = Path(folder)
        logs, late = run_forks(line.ranks, here, lambda rank: _rank(line, balanced, here / f"traffic-{rank}"), limit)
        losses = [float(found) for log in logs for found in _LOSS.findall(log)]
        counted = [json.loads(path.read_text()) for path in here.glob("traffic-*")]
    traffic: dict[str, list[int]] = {}
    for rank in counted:
        for name, both in rank.items():
            traffic[name] = [a + b for a, b in zip(traffic.get(name, [0, 0]), both, strict=True)]
    failed = late or len(counted) < line.ranks or not losses
    reason = f"no end within {limit:g} s" if late else _last_error(logs) if failed else ""
    loss = None if failed else losses[-1]
    return Trained(line.case, line.layout, line.ranks, balanced, loss, reason, traffic)


def _last_error(logs: Sequence[str]) -> str:
    lines = [
        line for log in logs for line in log.splitlines() if re.match(r"\w*(Error|error|rank|Exception)\b.*:", line)
    ]
    return lines[0][:300] if lines else "no loss"


def _rank(line: SmallLine, balanced: bool, notes: Path) -> None:
    """Train in this rank, and write down its traffic."""
    import torch

    from optimus_cc_ext.hooks import launched, start

    torch.set_num_threads(1)
    os.environ["OPTIMUS_CC_NODE"] = "ranks:1"
    if "--context-parallel-size" in line.layout:
        cpu_attention.install()
    sys.argv = [line.script, *line.flags, *(BALANCED if balanced else ())]
    if balanced:
        start()
    runpy.run_path(line.script, run_name="__main__")
    launch = launched()
    total = {} if launch is None or launch.session is None else launch.session.traffic.total()
    notes.write_text(json.dumps({traffic.tag: list(counts) for traffic, counts in total.items()}))


def table(runs: Sequence[Trained]) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    pairs = {(run.case, run.balanced): run for run in runs}
    yield "| line | ranks | vanilla's last loss | balanced | difference | compressed |"
    yield "|---|---:|---:|---:|---:|---|"
    good = trained = 0
    for run in (run for run in runs if not run.balanced):
        ours = pairs.get((run.case, True))
        if run.loss is None or ours is None:
            yield f"| {run.case} | {run.ranks} | fails: {run.reason} | | | |"
            continue
        trained += 1
        change = None if ours.loss is None else ours.loss / run.loss - 1
        good += change is not None and abs(change) < TOLERANCE and bool(ours.compressed)
        cells = (ours.reason, "") if change is None else (f"{ours.loss:.4f}", f"{change:+.2%}")
        yield f"| {run.case} | {run.ranks} | {run.loss:.4f} | {' | '.join(cells)} | {', '.join(ours.compressed)} |"
    yield ""
    yield f"{trained} lines train in vanilla; in {good} of them balanced compresses and ends within {TOLERANCE:.0%}."


def main() -> int:
    """Train what is not in the results yet, and print the table."""
    parser = argparse.ArgumentParser(prog="scripts/compat_train.sh", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a checkout of Megatron-LM")
    parser.add_argument("--lines", type=int, default=24, help="number of lines to train (default: %(default)d)")
    parser.add_argument("--ranks", type=int, default=8, help="largest number of ranks of a line (default: %(default)d)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a run (default: %(default)g)")
    parser.add_argument(
        "--results", type=Path, default=Path("results/compat_train"), metavar="FOLDER",
        help="folder of runs.jsonl, which a second start continues (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    results, checkout = options.results.resolve() / "runs.jsonl", options.checkout.resolve()
    results.parent.mkdir(parents=True, exist_ok=True)
    runs = [Trained(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
    made = {(run.case, run.balanced): run for run in runs}
    layouts = [
        line
        for line in distinct_layouts(training_lines(checkout))
        if options.only in line.case and line.ranks <= options.ranks
    ]
    step = max(1, len(layouts) // options.lines)
    order = [line for first in range(step) for line in layouts[first::step]]
    _prepare(checkout)
    trained = 0
    with results.open("a") as stream:
        for line in order:
            if trained == options.lines:
                break
            for balanced in (False, True):
                if (run := made.get((line.case, balanced))) is None:
                    run = train(line, balanced, options.limit)
                    runs.append(run)
                    stream.write(json.dumps(asdict(run)) + "\n")
                    stream.flush()
                if run.loss is None and not balanced:
                    break
            else:
                trained += 1
    print("\n".join(table(runs)))
    return 0


def _prepare(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    from optimus_cc_ext.tools.cpu import cpu_runtime

    warnings.simplefilter("ignore")  # Megatron warns once per missing GPU library that it falls back
    cpu_runtime.activate()
    import megatron.core.datasets
    import megatron.training.training

    # A checkout whose helper was not compiled takes that of the wheel.
    wheel = importlib.metadata.distribution("megatron-core").locate_file("megatron/core/datasets")
    megatron.core.datasets.__path__.append(str(wheel))
    import optimus_cc_ext.hooks.launching  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
