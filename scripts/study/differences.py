"""Measurement of what a step changes in the weights: differences in last places, and their bits in six codings.

    python -m scripts.study.differences                     # make all missing runs; a row for each point and kind
    python -m scripts.study.differences --models gpt --show
    python -m scripts.study.differences --models gpt,llama --cases weight-decay,rate-spike --points 39,40,41,50

Vanilla Megatron trains each model in bf16 on two pipeline stages. The step after the last point, at a learning rate of
1e-6, is measured, too; its weights are written to OUTPUT/MODEL.pt for `python -m scripts.bench.deltas`.
"""

import argparse
import itertools
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.report.table import Table, printed
from scripts.experiments.command import add_run_options, missing_made
from scripts.experiments.models import MODELS, ExperimentError, Layout, Training
from scripts.experiments.runs import Runs, add_row, read_rows
from scripts.experiments.texts import hash_of, text_of
from scripts.hosts.launch import RunFailed
from scripts.study.__main__ import KEPT, points_of
from scripts.study.codings import CODINGS, UNTOUCHED
from scripts.study.grid import shrunk

ROWS = Path("results/exact-bits.csv")
COLUMNS = (
    "model", "case", "iteration", "rate", "kind", "values", "unchanged", *CODINGS, "seed", "points", "text_hash",
    "commit",
)  # fmt: skip
"""Columns of the file. Codings are in bits a value, `unchanged` is a share of the values."""

CASES = {
    "training": ("", "0:1:1"), "low-rate": ("--lr 1e-4 --min-lr 1e-5", "0:1:1"),
    "small-weights": ("--init-method-std 0.0156", "0:1:1"),
    "weight-decay": ("", "40:1:0"), "rate-spike": ("", "40:10:1"), "gradient-spike": ("--clip-grad 0", "40:1:100"),
}  # fmt: skip
"""Kinds of training by name: more of Megatron's flags, and the value of SPIKE in `noting_differences`."""


def main(argv: Sequence[str]) -> int:
    """Run the measurement; return the exit status of `scripts.study`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.differences", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--models", default="gpt,llama,moe,llama-muon", help="models (%(default)s)")
    add("--cases", default="training", help=f"cases, of {', '.join(CASES)} (%(default)s)")
    add("--points", default="1,2,3,4,5,6,7,8,9,10,50,150,300", help="iterations that are measured (%(default)s)")
    add("--seed", type=int, default=1, help="seed of the trainings (%(default)s)")
    add("--max-mb", type=float, default=10.0, metavar="MB", help="read this much of the text (%(default)g)")
    add_run_options(parser, ROWS, Path("results/differences"))
    options = parser.parse_args(argv)
    points = points_of(parser, options.points)
    if unknown := [each for each in options.models.split(",") if each not in MODELS]:
        parser.error(f"--models: {unknown[0]!r} is none of {', '.join(MODELS)}")
    if unknown := [each for each in options.cases.split(",") if each not in CASES]:
        parser.error(f"--cases: {unknown[0]!r} is none of {', '.join(CASES)}")
    return run_command(lambda: study(options, points), KEPT)


def study(options: argparse.Namespace, points: Sequence[int]) -> int:
    """Make the missing runs, then show all rows."""
    runs = list(itertools.product(options.models.split(","), options.cases.split(",")))
    failed = missing_made(options, lambda: sum(not made(options, *run, points) for run in runs))
    rows = read_rows(options.rows, COLUMNS)
    columns = ("model", "case", "iteration", "rate", "kind", "unchanged", *CODINGS)
    table = Table(columns, [tuple(row[each] for each in columns) for row in rows], "Bits a value", name="bits")
    print(printed([table], "table"), end="")
    return 1 if failed else 0


def made(options: argparse.Namespace, model: str, case: str, points: Sequence[int]) -> bool:
    """Train one model in one case if the file lacks its rows; return whether they are there."""
    # Muon keeps whole masters here: Megatron's distributed optimizer for Muon copies shards in another way.
    layout = Layout(replicas=1, sharded="muon" not in model)
    training = Training(
        model=shrunk(MODELS[model]) if options.tiny else MODELS[model], layout=layout, iterations=points[-1] + 1,
        schedule=points[-1], evaluation_iterations=1, seed=options.seed,
    )  # fmt: skip
    data = text_of(None).prepared(options.output / "text", training.model.vocabulary, options.max_mb)
    training.check(data)
    runs = Runs(options.output / "runs", hash_of(data), options.timeout, options.retry)
    key = {
        "model": model, "case": case, "seed": str(options.seed), "points": " ".join(map(str, points)),
        "text_hash": runs.text[:12],
    }  # fmt: skip
    if any(key.items() <= row.items() for row in read_rows(options.rows, COLUMNS)):
        return True
    name = model if case == "training" else f"{model}-{case}"
    folder, (further, spike) = (runs.folder / name).absolute(), CASES[case]
    flags = [
        "scripts/study/noting_differences.py", str(folder), ",".join(map(str, [*points, points[-1] + 1])), spike,
        *training.megatron_flags(data), *(() if layout.sharded else ("--bf16",)),
        "--eval-interval", str(10 * training.iterations), *further.split(),
    ]  # fmt: skip
    try:
        row = runs.made(name, training.processes, flags, training.seed, measured)
    except (RunFailed, ExperimentError) as failure:
        print(f"{name}: failed: {failure}", file=sys.stderr)
        return False
    for found in row["found"]:
        add_row(options.rows, key | found | {"commit": row["commit"]}, COLUMNS)
    pairs = [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank-*.pt"))]
    torch.save([[each for side in sides for each in side] for sides in zip(*pairs, strict=True)],
               options.output / f"{name}.pt")  # fmt: skip
    shutil.rmtree(folder)
    return True


def measured(folder: Path) -> dict[str, Any]:
    """Return the rows of a run: for each iteration, those of each kind, and of all parameters."""
    sums: dict[tuple[int, float, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            # Untouched rows are among those of the vocabulary, too.
            for kind in (found["kind"],) if found["kind"] == UNTOUCHED else (found["kind"], "all"):
                for name in ("values", "unchanged", *CODINGS):
                    sums[found["iteration"], found["rate"], kind][name] += found[name]
    return {"found": [
        {"iteration": iteration, "rate": f"{rate:.3g}", "kind": kind, "values": int(total["values"])}
        | {name: round(total[name] / total["values"], 4) for name in ("unchanged", *CODINGS)}
        for (iteration, rate, kind), total in sorted(sums.items())
    ]}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
