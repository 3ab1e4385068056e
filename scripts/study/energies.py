"""Energy of each format's error on the sum of real gradients, over the sum's own: e2 of the price's law (law.py).

    python -m scripts.study.energies --models llama --texts python,prose
    python -m scripts.study.energies --show

From the weights that vanilla has at some points of a training, the same batches are passed through Megatron's real
loop, dense and with data-parallel gradients in each format. A row also says which part of the gradients' energy is
noise, which changes from batch to batch. Finished runs are not repeated.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.report.table import Table, printed
from scripts.experiments.command import add_run_options, missing_made
from scripts.experiments.models import MODELS, Layout, Training
from scripts.experiments.runs import Runs, add_row, commit, read_rows
from scripts.experiments.texts import TEXTS, hash_of
from scripts.hosts.launch import RunFailed
from scripts.study.__main__ import KEPT, points_of
from scripts.study.grid import RUNS, shrunk
from scripts.study.kinds import Gradients, coded_from_weights, error

ROWS = RUNS.with_name("price-energies.csv")
COLUMNS = (
    "model",
    "layout",
    "text",
    "point",
    "of",
    "format",
    "energy",
    "noise",
    "batches",
    "seed",
    "text_hash",
    "commit",
)
"""Columns of the file: `of` is the length of the training, `energy` e2, `noise` a share of the gradients' energy."""

FORMATS = ("int8", "int4", "int3", "int2")


def main(argv: Sequence[str]) -> int:
    """Run the measurement; return the exit status of `scripts.study`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.energies", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--models", default="llama", help="models (%(default)s)")
    add("--texts", default="python", help=f"texts, of {', '.join(TEXTS)} (%(default)s)")
    add("--formats", default=",".join(FORMATS), help="formats, the product's or int2, int3, int5, int6 (%(default)s)")
    add("--layout", type=Layout.parsed, default=Layout(), help="as of scripts.study.grid (%(default)s)")
    add("--points", default="20,60,110,160", help="iterations of the training; the last is its end (%(default)s)")
    add("--batches", type=int, default=8, metavar="N", help="batches that are compared, two or more (%(default)s)")
    add("--seed", type=int, default=1)
    add("--max-mb", type=float, default=10.0, metavar="MB", help="read this much of each text (%(default)g)")
    add_run_options(parser, ROWS, Path("results/energies"))
    options = parser.parse_args(argv)
    points = points_of(parser, options.points)
    for flag, known in (("models", MODELS), ("texts", TEXTS)):
        for name in getattr(options, flag).split(","):
            if name not in known:
                parser.error(f"--{flag}: {name!r} is none of {', '.join(known)}")
    if options.batches < 2:
        parser.error("--batches: give 2 or more; the noise is what differs between them")
    return run_command(lambda: study(options, points), KEPT)


def study(options: argparse.Namespace, points: Sequence[int]) -> int:
    """Make the missing runs, then show all rows."""
    pairs = list(itertools.product(options.models.split(","), options.texts.split(",")))
    failed = missing_made(options, lambda: sum(not made(options, *pair, points) for pair in pairs))
    rows = read_rows(options.rows, COLUMNS)
    shown = ("model", "layout", "text", "point", "format", "energy", "noise")
    table = Table(shown, [tuple(row[each] for each in shown) for row in rows], "Energy of the error", name="energies")
    print(printed([table], "table"), end="")
    return 1 if failed else 0


def made(options: argparse.Namespace, model: str, text: str, points: Sequence[int]) -> bool:
    """Make the rows of one model and text that the file lacks; return whether all are there."""
    training = Training(
        model=shrunk(MODELS[model]) if options.tiny else MODELS[model], layout=options.layout, iterations=points[-1],
        seed=options.seed, evaluation_iterations=1,
    )  # fmt: skip
    data = TEXTS[text].prepared(options.output / f"text-{text}", training.model.vocabulary, options.max_mb)
    origin = {
        "model": model, "layout": str(options.layout), "text": text, "of": str(points[-1]),
        "batches": str(options.batches), "seed": str(options.seed), "text_hash": hash_of(data)[:12],
    }  # fmt: skip
    there = [row for row in read_rows(options.rows, COLUMNS) if origin.items() <= row.items()]
    formats = [
        form for form in options.formats.split(",")
        if not {str(point) for point in points} <= {row["point"] for row in there if row["format"] == form}
    ]  # fmt: skip
    if not formats:
        return True
    runs = Runs(options.output / f"{model}-{text}-{options.layout}", "", options.timeout, options.retry)
    try:
        for point, found in coded_from_weights(training, data, runs, points, formats, options.batches, measured):
            for form in formats:
                row = origin | {"point": str(point), "format": form, "commit": commit()}
                add_row(options.rows, row | {each: found[form][each] for each in ("energy", "noise")}, COLUMNS)
    except RunFailed as failure:
        print(f"{model}, {text}: failed: {failure} ({failure.log})", file=sys.stderr)
        return False
    return True


def measured(ours: Gradients, dense: Gradients) -> dict[str, Any]:
    """Return the energy of the error of all batches over the energy of the gradients, and the part of the latter that
    is noise.

    Raises:
        ValueError: the two runs do not have gradients of the same batches and matrices.
    """
    if len(dense) < 2 or [each.keys() for each in ours] != [each.keys() for each in dense]:
        raise ValueError("the two runs have not made gradients of the same batches and matrices")
    pairs = [(mine[name], exact[name]) for mine, exact in zip(ours, dense, strict=True) for name in exact]
    return {"energy": f"{error(pairs) ** 2:.4e}", "noise": f"{noise(dense):.4f}"}


def noise(batches: Gradients) -> float:
    """Return the part of the gradients' mean energy that differs from batch to batch, without bias."""
    count, whole, common = len(batches), 0.0, 0.0
    for name in batches[0]:
        whole += sum(float(batch[name].double().square().sum()) for batch in batches)
        common += float(sum(batch[name].double() for batch in batches).square().sum())  # type: ignore[union-attr]
    return (whole - common / count) / (count - 1) * count / whole


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
