"""What each format costs the model: variants x seeds of the quickstart's model, on the real training loop.

    python -m scripts.study --variants vanilla,one-ulp,other-order,paper,balanced --seeds 1,2,3
    python -m scripts.study --screen                        # every variant, one seed
    python -m scripts.study --variants vanilla,mine --seeds 1,2,3 -- --dp-compression-format int8

Every variant sees the same text in the same order from the same weights as vanilla with its seed; what is compared is
the paired difference of validation losses. One folder a run in OUTPUT/runs; what is there is not trained again, so an
interrupted study goes on where it was. A run that fails is marked, the others go on; --retry trains it again.
Variant "mine" is what follows --. Variants "one-ulp" and "other-order" are vanilla against itself.
"""

import argparse
import dataclasses
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus_cc_ext.data import PreparedData, prepare
from optimus_cc_ext.errors import run_command
from optimus_cc_ext.report.record import read_logs, shares
from scripts.hosts.launch import RunFailed
from scripts.quickstart.settings import TINY, Settings, config_of, device_here
from scripts.study.results import losses, prices, save_picture, spread, traffic
from scripts.study.runs import Runs
from scripts.study.variants import CONTROLS, VARIANTS, script_of, words_of

MINE = "mine"
KEPT = "finished runs are kept, the same command goes on"
NAMES = (*VARIANTS, *CONTROLS)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="vanilla,paper,balanced", help=f"of {', '.join(NAMES)}, {MINE}")
    parser.add_argument("--seeds", help="1,2,3; with --screen 1")
    parser.add_argument("--screen", action="store_true", help="all variants but mine")
    parser.add_argument("--show", action="store_true", help="what is there, and train nothing that is not")
    add_common_options(parser, Path("results/study"))
    parser.add_argument("--iterations", type=int, default=160, metavar="N", help="of each run (%(default)s)")
    parser.add_argument("--common", default="", metavar="FLAGS", help="of every run, vanilla too, in one word")
    parser.add_argument("--evaluations", type=int, default=64, metavar="N", help="validation batches (%(default)s)")
    return parser


def add_common_options(parser: argparse.ArgumentParser, output: Path) -> None:
    """Those that the study of gradients has as well."""
    parser.add_argument("--output", type=Path, default=output, metavar="DIR", help="%(default)s")
    parser.add_argument("--input", type=Path, help="text to train on (the Python sources of this environment)")
    parser.add_argument("--max-mb", type=float, default=10.0, help="of it (%(default)g)")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="MINUTES", help="for one run (%(default)g)")
    parser.add_argument("--retry", action="store_true", help="train again what failed")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)


def main(argv: Sequence[str]) -> int:
    """Run it.

    Returns the exit status: 0; 1: a run failed; 2: bad input, or the disk is full; 130: interrupted. What is finished
    is kept.
    """
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = build_parser()
    options, mine = parser.parse_args(argv[:cut]), list(argv[cut + 1 :])
    variants = list(NAMES) if options.screen else options.variants.split(",")
    seeds = (options.seeds or ("1" if options.screen else "1,2,3")).split(",")
    for variant in variants:
        if variant not in NAMES and variant != MINE:
            parser.error(f"--variants: {variant!r} is none of {', '.join(NAMES)}, {MINE}")
    if (MINE in variants) != bool(mine):
        parser.error("--variants mine and the flags of it behind -- belong together. Give both")
    if not all(seed.isdecimal() for seed in seeds) or options.iterations < 2 or options.evaluations < 1:
        parser.error("--seeds, --iterations, --evaluations: give whole numbers, 2 iterations and 1 batch at least")
    return run_command(lambda: study(options, variants, [int(seed) for seed in seeds], mine), KEPT)


def study(options: argparse.Namespace, variants: Sequence[str], seeds: Sequence[int], mine: Sequence[str]) -> int:
    """Make what is missing, seed by seed, so that pairs are complete as early as can be; show all."""
    model = TINY if options.tiny else Settings()
    settings = dataclasses.replace(model, iterations=options.iterations, device=device_here(model.processes))
    common = shlex.split(options.common)
    ours = {variant: list(mine) if variant == MINE else words_of(variant, settings) for variant in variants}
    for variant in variants:
        if variant not in CONTROLS and not common:  # which may change what is refused: the first run says so
            config_of(settings, ours[variant])
    if settings.device != "cpu":
        print(f"device: {settings.device}, bf16", flush=True)
    data = prepared(options, settings)
    runs = Runs(options.output / "runs", options.timeout, options.retry, settings.device)
    results: dict[tuple[str, int], dict[str, Any]] = {}
    failed = 0
    for seed in seeds:
        for variant in variants:
            name = f"{variant}-seed{seed}"
            seeded = dataclasses.replace(settings, seed=seed, evaluation_iterations=options.evaluations)
            flags = [
                *script_of(variant), *seeded.megatron_flags(data, runs.folder / name / "tensorboard"), *ours[variant],
                # One validation, after the last iteration.
                "--eval-interval", str(10 * settings.iterations), *common,
            ]  # fmt: skip
            if options.show and runs.known(name, flags) is None:
                continue
            try:
                results[variant, seed] = runs.made(name, settings.processes, flags, read)
            except RunFailed as failure:
                failed += 1
                print(f"{name}: failed: {failure} ({failure.log})", file=sys.stderr)
    if options.show:
        variants = [variant for variant in variants if any((variant, seed) in results for seed in seeds)]
    batches = f"Validation over {options.evaluations} global batches."
    bands = spread(results, seeds)
    own = "".join(f" Vanilla against itself, {CONTROLS[name]}: {width:.3f} %." for name, width in bands.items())
    title = f"Losses after {settings.iterations} iterations"
    for table in (losses(results, variants, seeds, title, batches + own), traffic(results, variants, seeds)):
        print(table.markdown())
        table.write_csv(options.output / f"{table.title.split()[0].strip(',').lower()}.csv")
    points = prices(results, variants, seeds)
    points.write_csv(options.output / "prices.csv")
    save_picture(points, bands, f"What compression costs, {settings.iterations} iterations", options.output, "prices")
    return 1 if failed else 0


def read(folder: Path) -> dict[str, Any]:
    """What is kept of a run, from its log."""
    record = read_logs(folder)
    return {
        "validation loss": record.validation.last,
        "seconds": record.seconds.median,
        "bytes": {share.name: [share.raw, share.sent] for share in shares(record)},
    }


def prepared(options: argparse.Namespace, settings: Settings) -> PreparedData:
    """The text, beside the output."""
    folder = options.output.with_name(f"{options.output.name}-data").absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    return prepare(
        options.input or Path(sysconfig.get_path("purelib")), folder, vocab_size=settings.vocabulary,
        pattern="*.txt" if options.input else "*.py", max_mb=options.max_mb, progress=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
