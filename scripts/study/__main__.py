"""Study of each format's cost for the model: variants x seeds of the quickstart's model, on the real training loop.

    python -m scripts.study --variants vanilla,one-ulp,other-order,paper,balanced --seeds 1,2,3
    python -m scripts.study --screen                        # every variant, one seed
    python -m scripts.study --variants vanilla,mine --seeds 1,2,3 -- --dp-compression-format int8

Every variant sees the same text in the same order from the same weights as vanilla with its seed; the study compares
paired differences of validation losses. Each run has one folder in OUTPUT/runs. Finished runs are not trained again, so
an interrupted study goes on where it was. A run that fails is marked, and the others go on; --retry trains it again.
Variant "mine" has the flags after --. Variants "one-ulp" and "other-order" compare vanilla with itself.
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.data import PreparedData
from optimus_cc_ext.tools.report.document import Picture, ReportDocument
from optimus_cc_ext.tools.report.record import read_logs, shares
from optimus_cc_ext.tools.report.table import printed
from scripts.experiments.command import add_text_options, words_and_further
from scripts.experiments.models import MODELS, Training, device_here
from scripts.experiments.runs import Runs
from scripts.experiments.texts import hash_of, text_of
from scripts.experiments.variants import EXPERTS, PRICE, STUDY, flags_of, larger_ranks
from scripts.hosts.launch import RunFailed
from scripts.study.law import SLOPES
from scripts.study.results import CONTROLS, draw_prices, losses, prices, spread, traffic

MINE = "mine"
KEPT = "finished runs are kept, the same command goes on"
SCRIPTS = {
    "other-order": "scripts/study/other_order.py",
    "noise-1e-6": "scripts/study/noise_1e6.py",
    "noise-int4": "scripts/study/noise_int4.py",
    "int8-vocabulary": "scripts/study/in_formats.py int4 int8",
    "int4-vocabulary": "scripts/study/in_formats.py int8 int4",
    "int5": "scripts/study/in_formats.py int5 int5",
    "int6": "scripts/study/in_formats.py int6 int6",
    "dp-int3": "scripts/study/in_formats.py int3 int3",
    "dp-int2": "scripts/study/in_formats.py int2 int2",
    "dp-shaped": "scripts/study/noise_shaped.py",
    **{name: f"scripts/study/batches.py {name}" for name in SLOPES},
}
"""Training script of each variant that does not train with the package's own entry point, with its arguments. Paths
are relative to the folder that holds scripts/, so that a run does not depend on the checkout's path.
"""

NAMES = (*STUDY, *CONTROLS, "noise-int4")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the study's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--variants", default="vanilla,paper,balanced", help=f"variants to train, of {', '.join(NAMES)}, {MINE}"
    )
    parser.add_argument("--seeds", help="seeds of the trainings (1,2,3; with --screen 1)")
    parser.add_argument("--screen", action="store_true", help="train all variants but mine")
    parser.add_argument("--show", action="store_true", help="show finished runs, and train nothing")
    add_common_options(parser, Path("results/study"))
    parser.add_argument("--iterations", type=int, default=160, metavar="N", help="iterations of each run (%(default)s)")
    parser.add_argument("--common", default="", metavar="FLAGS", help="flags of every run, vanilla's too, as one word")
    parser.add_argument("--evaluations", type=int, default=64, metavar="N", help="validation batches (%(default)s)")
    return parser


def add_common_options(parser: argparse.ArgumentParser, output: Path) -> None:
    """Add the options that this study shares with the study of gradients (`gradients.py`)."""
    parser.add_argument(
        "--output", type=Path, default=output, metavar="DIR", help="folder of the results (%(default)s)"
    )
    add_text_options(parser, max_mb=10.0)
    parser.add_argument("--timeout", type=float, default=30.0, metavar="MINUTES", help="limit of one run (%(default)g)")
    parser.add_argument("--retry", action="store_true", help="train failed runs again")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)


def points_of(parser: argparse.ArgumentParser, text: str) -> list[int]:
    """Return the iterations of --points, sorted; bad input ends the process with status 2."""
    points = text.split(",")
    if not all(point.isdecimal() and int(point) for point in points):
        parser.error("--points: give whole numbers of at least 1")
    return sorted(map(int, points))


def main(argv: Sequence[str]) -> int:
    """Run the study.

    Returns the exit status: 0; 1: a run failed; 2: bad input, or the disk is full; 130: interrupted. Finished runs are
    kept.
    """
    words, mine = words_and_further(argv)
    parser = build_parser()
    options = parser.parse_args(words)
    variants = list(NAMES) if options.screen else options.variants.split(",")
    seeds = (options.seeds or ("1" if options.screen else "1,2,3")).split(",")
    for variant in variants:
        if variant not in NAMES and variant != MINE:
            parser.error(f"--variants: {variant!r} is none of {', '.join(NAMES)}, {MINE}")
    if (MINE in variants) != bool(mine):
        parser.error("--variants mine and its flags after -- belong together. Give both")
    if not all(seed.isdecimal() for seed in seeds) or options.iterations < 2 or options.evaluations < 1:
        parser.error("--seeds, --iterations, --evaluations: give whole numbers, 2 iterations and 1 batch at least")
    return run_command(lambda: study(options, variants, [int(seed) for seed in seeds], mine), KEPT)


def words_of(variant: str, training: Training) -> list[str]:
    """Return the flags of a variant, which follow Megatron's."""
    if variant == "one-ulp":
        # One ulp of an fp32 weight is between 6e-8 and 1.2e-7 of its value, so this factor moves a weight by one or
        # two ulps.
        return ["--init-method-std", repr(training.model.hidden**-0.5 * (1 + 1.2e-7))]
    text = {**STUDY, **EXPERTS, **PRICE}.get(variant, "")
    return flags_of(text, training.layout, larger_ranks(training.model.hidden))


def study(options: argparse.Namespace, variants: Sequence[str], seeds: Sequence[int], mine: Sequence[str]) -> int:
    """Make missing runs, seed by seed, so that pairs are complete as early as possible; show all runs."""
    training = Training(model=MODELS["test" if options.tiny else "gpt"])
    training = dataclasses.replace(
        training, iterations=options.iterations, evaluation_iterations=options.evaluations,
        device=device_here(training.processes),
    )  # fmt: skip
    common = shlex.split(options.common)
    ours = {variant: list(mine) if variant == MINE else words_of(variant, training) for variant in variants}
    for variant in variants:
        # --common flags may make these flags valid or not, which only the first run shows
        if variant in (*STUDY, MINE) and not common:
            training.config_of(ours[variant])
    if training.device != "cpu":
        print(f"device: {training.device}, bf16", flush=True)
    data = prepared(options, training)
    runs = Runs(options.output / "runs", hash_of(data), options.timeout, options.retry, training.device)
    results: dict[tuple[str, int], dict[str, Any]] = {}
    failed = 0
    for seed in seeds:
        for variant in variants:
            name = f"{variant}-seed{seed}"
            seeded = dataclasses.replace(training, seed=seed)
            tensorboard = runs.folder / name / "tensorboard"
            flags = [
                *SCRIPTS.get(variant, "").split(), *seeded.megatron_flags(data, tensorboard),
                *ours[variant],
                # A run validates once, after its last iteration.
                "--eval-interval", str(10 * training.iterations), *common,
            ]  # fmt: skip
            if options.show and runs.known(name, flags) is None:
                continue
            try:
                results[variant, seed] = runs.made(name, training.processes, flags, seed, read)
            except RunFailed as failure:
                failed += 1
                print(f"{name}: failed: {failure} ({failure.log})", file=sys.stderr)
    if options.show:
        variants = [variant for variant in variants if any((variant, seed) in results for seed in seeds)]
    batches = f"Validation over {options.evaluations} global batches."
    bands = spread(results, seeds)
    own = "".join(f" Vanilla against itself, {CONTROLS[name]}: {width:.3f} %." for name, width in bands.items())
    title = f"Losses after {training.iterations} iterations"
    tables = [losses(results, variants, seeds, title, batches + own), traffic(results, variants, seeds)]
    print(printed(tables, "table"), end="")
    points = prices(results, variants, seeds)
    figure = draw_prices(points, bands, f"What compression costs, {training.iterations} iterations")
    picture = Picture("prices", figure, points.in_words(["variant"], points.columns[1:]) + own)
    ReportDocument("", "", [*tables, picture], files=[points, runs.rows()]).write(options.output)
    return 1 if failed else 0


def read(folder: Path) -> dict[str, Any]:
    """Return the measurements of a run, from its log."""
    record = read_logs(folder)
    return {
        "validation loss": record.validation.last,
        "seconds": record.seconds.median,
        "bytes": {share.name: [share.raw, share.sent] for share in shares(record)},
    }


def prepared(options: argparse.Namespace, training: Training) -> PreparedData:
    """Return the prepared text, which lies beside the output."""
    options.output.mkdir(parents=True, exist_ok=True)
    folder = options.output.with_name(f"{options.output.name}-data")
    return text_of(options.input).prepared(folder, training.model.vocabulary, options.max_mb)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
