"""Proof that exact gathers keep vanilla's losses and weights to the bit, with the bytes that they send.

    python -m scripts.study.exact                           # make all missing runs; each is a line of the file
    python -m scripts.study.exact --cells gpt:pp2dp2z1:60 --variants vanilla,gather
    python -m scripts.study.exact --show                    # the table of all runs that were made

A cell is a model, a layout and a number of iterations, on Megatron's real loop: bf16, the distributed optimizer, both
overlaps, evaluations and saves. Its runs differ in our flags alone, so that they have to have the same loss in each
iteration, and the same weights after each 50th. An interrupted study goes on where it was.
"""

import argparse
import hashlib
import itertools
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.report.record import read_logs
from optimus_cc_ext.tools.report.table import Table, printed
from scripts.experiments.command import add_run_options, missing_made
from scripts.experiments.models import MODELS, ExperimentError, Layout, Training
from scripts.experiments.runs import Runs, add_row, read_rows
from scripts.experiments.texts import hash_of, text_of
from scripts.hosts.launch import RunFailed
from scripts.study.__main__ import KEPT
from scripts.study.grid import kind_of_cpu, shrunk

ROWS = Path("results/exact-runs.csv")
COLUMNS = (
    "model", "layout", "iterations", "micro_batches", "seed", "variant", "losses", "weights", "last_loss", "bytes",
    "worst", "after_save", "compressed", "seconds", "cpu", "text_hash", "flags", "commit",
)  # fmt: skip
"""Columns of the file. `losses` and `weights` are hashes of all losses, and of the weights of all ranks. `bytes` is the
gather's share of vanilla's in the whole run, `worst` in the worst iteration after the first, without the one after the
save, whose share is `after_save`. `compressed` counts iterations that sent less than vanilla.
"""

VARIANTS = {
    "vanilla": "", "gather": "--param-gather-format exact --no-compression-trial",
    "preset": "--optimus-cc exact --no-compression-trial", "trial": "--optimus-cc exact",
}  # fmt: skip
CELLS = "gpt:pp2dp2z1:300,llama:pp1dp4z1n2:300,gpt:pp1dp4z1:60,llama:pp2dp2z1:60,moe-ep2:pp1dp4z1n2:60"
_COMMON = "--overlap-grad-reduce --overlap-param-gather"
_DIGESTS = 50
"""Iterations between two digests of all weights; a run of fewer has one, after its last iteration."""


def main(argv: Sequence[str]) -> int:
    """Run the study; return the exit status of `scripts.study`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.exact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cells", default=CELLS, help="model:layout:iterations, with commas between cells (%(default)s)")
    add("--variants", default=",".join(VARIANTS), help="variants, the first of them vanilla (%(default)s)")
    add("--micro-batches", type=int, metavar="N", help="micro-batches of a replica in an iteration (the model's)")
    add("--seed", type=int, default=1, help="seed of the trainings (%(default)s)")
    add("--max-mb", type=float, default=10.0, metavar="MB", help="read this much of the text (%(default)g)")
    add_run_options(parser, ROWS, Path("results/exact"))
    options = parser.parse_args(argv)
    if unknown := [each for each in options.variants.split(",") if each not in VARIANTS]:
        parser.error(f"--variants: {unknown[0]!r} is none of {', '.join(VARIANTS)}")
    return run_command(lambda: study(options), KEPT)


def study(options: argparse.Namespace) -> int:
    """Make the missing runs, cell by cell, then show the table of all runs in the file."""
    runs = list(itertools.product(options.cells.split(","), options.variants.split(",")))
    failed = missing_made(options, lambda: sum(not made(options, *run) for run in runs))
    rows = read_rows(options.rows, COLUMNS)
    print(printed([table(rows)], "table"), end="")
    return 1 if failed or differing(rows) else 0


def made(options: argparse.Namespace, cell: str, variant: str) -> bool:
    """Train one run if the file lacks it; return whether there is its row."""
    try:
        model, layout, iterations = cell.split(":")
        chosen = shrunk(MODELS[model]) if options.tiny else MODELS[model]
        training = Training(
            model=replace(chosen, micro_batches=options.micro_batches or chosen.micro_batches),
            layout=Layout.parsed(layout), iterations=int(iterations), evaluation_iterations=1, seed=options.seed,
        )  # fmt: skip
    except (ValueError, KeyError):
        raise ExperimentError(f"--cells: {cell!r} is no cell. Give model:layout:iterations, as {CELLS}") from None
    vocabulary = training.model.vocabulary
    data = text_of(None).prepared(options.output / f"text-{vocabulary}", vocabulary, options.max_mb)
    training.check(data)
    runs = Runs(options.output / "runs", hash_of(data), options.timeout, options.retry)
    key = {
        "model": model, "layout": layout, "iterations": iterations, "seed": str(options.seed), "variant": variant,
        "micro_batches": str(training.model.micro_batches),
        "cpu": kind_of_cpu(), "text_hash": runs.text[:12], "flags": f"{_COMMON} {VARIANTS[variant]}".strip(),
    }  # fmt: skip
    if any(key.items() <= row.items() for row in read_rows(options.rows, COLUMNS)):
        return True
    name = "-".join(key[part] for part in ("model", "layout", "iterations", "micro_batches", "variant", "seed"))
    folder = (runs.folder / name).absolute()
    save = training.iterations // 2
    flags = [
        "scripts/study/noting_weights.py", str(folder), str(min(_DIGESTS, training.iterations)),
        *training.megatron_flags(data), *shlex.split(key["flags"]),
        "--save", str(folder / "checkpoint"), "--save-interval", str(save), "--ckpt-format", "torch",
    ]  # fmt: skip
    try:
        row = runs.made(
            name, training.processes, flags, training.seed, partial(measured, save=save),
            beside=training.layout.beside, may_try=variant == "trial",
        )  # fmt: skip
    except RunFailed as failure:
        print(f"{name}: failed: {failure} ({failure.log})", file=sys.stderr)
        return False
    add_row(options.rows, key | {each: row[each] for each in COLUMNS if each not in key}, COLUMNS)
    shutil.rmtree(folder)
    return True


def measured(folder: Path, save: int) -> dict[str, Any]:
    """Read a run's measurements from its log and its ranks' files. The run saved after iteration `save`."""
    record = read_logs(folder)
    curves = [record.scalars.get(f"optimus-cc/parameter gather {side} bytes", {}) for side in ("raw", "sent")]
    raw, sent = sum(curves[0].values()), sum(curves[1].values())
    shares = {each: curves[1][each] / whole for each, whole in curves[0].items() if whole}
    losses, weights = hashlib.sha256(), hashlib.sha256()
    for path in sorted(folder.glob("rank-*.steps")):
        for line in path.read_text(encoding="utf-8").splitlines():
            iteration, loss, digest = line.split()
            losses.update(f"{path.name} {iteration} {loss}\n".encode())
            weights.update(f"{path.name} {iteration} {digest}\n".encode() if digest != "-" else b"")
    return {
        "losses": losses.hexdigest()[:16], "weights": weights.hexdigest()[:16], "last_loss": record.training.last,
        "bytes": round(sent / raw, 4) if raw else "",
        "worst": round(max((share for each, share in shares.items() if each not in (1, save + 1)), default=1), 4),
        "after_save": round(shares.get(save + 1, 1), 4), "compressed": sum(share < 1 for share in shares.values()),
        "seconds": round(record.seconds.median, 3),
    }  # fmt: skip


_SAME = ("model", "layout", "iterations", "micro_batches", "seed", "cpu", "text_hash")


def differing(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the runs whose losses or weights are not those of vanilla in the same cell."""
    vanilla = {tuple(row[each] for each in _SAME): row for row in rows if row["variant"] == "vanilla"}
    return [row for row in rows if not _equal(row, vanilla.get(tuple(row[each] for each in _SAME), row))]


def _equal(row: dict[str, str], other: dict[str, str]) -> bool:
    return (row["losses"], row["weights"]) == (other["losses"], other["weights"])


def table(rows: Sequence[dict[str, str]]) -> Table:
    """Make the table of all runs."""
    wrong = differing(rows)
    columns = (
        "model",
        "layout",
        "iterations",
        "micro_batches",
        "variant",
        "bytes",
        "worst",
        "after_save",
        "compressed",
        "seconds",
    )
    cells = [(*(row[each] for each in columns), row["commit"][:7], "no" if row in wrong else "yes") for row in rows]
    note = (
        "Bytes as shares of vanilla's. Equal: the losses of all iterations and the weights are vanilla's, to the bit."
    )
    return Table((*columns, "commit", "equal"), cells, "Exact gathers", note, name="exact")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
