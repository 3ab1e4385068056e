"""Study of each format's cost on several models and texts, whose finished runs are lines of one committed CSV file.

    python -m scripts.study.grid --models gpt,llama,moe --texts python,prose --variants vanilla,balanced --seeds 1,2,3
    python -m scripts.study.grid --show                     # the table of all runs that were made

A cell is a model, a text, a layout and a number of iterations. Every run of a cell with one seed starts from the same
weights and sees the same batches. A run's loss is the mean of its last four validations; the table compares it with
that of vanilla with the same seed, text, settings and kind of CPU. An interrupted study goes on where it was.
"""

import argparse
import dataclasses
import hashlib
import itertools
import re
import shlex
import shutil
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from optimus_cc_ext.config.classes import CLASSES, DP_GRADIENTS
from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.data import PreparedData
from optimus_cc_ext.tools.report.record import read_logs, shares
from optimus_cc_ext.tools.report.table import printed
from scripts.experiments.command import add_run_options, missing_made
from scripts.experiments.models import MODELS, ExperimentError, Layout, Model, Training
from scripts.experiments.runs import Runs, add_row, read_rows
from scripts.experiments.texts import TEXTS, hash_of, text_of
from scripts.experiments.variants import EXPERTS, PRICE, VANILLA
from scripts.hosts.launch import RunFailed, lines_in
from scripts.study.__main__ import KEPT, NAMES, SCRIPTS, words_of
from scripts.study.cells import LAST, compared, losses, verdicts
from scripts.study.law import SLOPES
from scripts.study.results import CONTROLS

RUNS = Path(__file__).resolve().parents[2] / "docs" / "study-runs.csv"
COLUMNS = (
    "model", "layout", "text", "iterations", "seed", "variant", "loss", "validations", "bytes", "seconds", "cpu",
    "text_hash", "settings", "flags", "commit", "load",
)  # fmt: skip
"""Columns of the file. `loss` is the mean of the last four of `validations` (iteration:loss), `bytes` all traffic over
vanilla's, `seconds` the median iteration, `settings` a hash of Megatron's flags without paths. `load` is the most
tokens of an expert over the mean, in the mean of the layers, micro-batches and ranks of the second half of a training.
"""

_MODES = {"noise-on-rows": ("noise", VANILLA), "experts-coded-validation": ("coded-validation", "experts")}
"""Mode of scripts/study/experts.py, and the variant whose flags are given, of each control of experts' tokens."""

VARIANTS = (*NAMES, *EXPERTS, *PRICE, *SLOPES, *_MODES)

_LOAD = re.compile(r"expert load in the second half: ([\d.]+)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of `python -m scripts.study.grid`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.grid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--models",
        default="gpt,llama,moe",
        help="models, of gpt, llama, llama-fsdp2, llama-muon, moe, moe-ep2, moe-ep4, moe-ep8, moe-bias-ep2,"
        " moe-bias-ep4 (%(default)s)",
    )
    add("--texts", default="python,prose", help=f"texts, of {', '.join(TEXTS)}, or files and folders (%(default)s)")
    add("--max-mb", type=float, default=10.0, metavar="MB", help="read this much of each text (%(default)g)")
    add("--variants", default="vanilla,balanced", help=f"variants, of {', '.join(VARIANTS)} (%(default)s)")
    add("--seeds", default="1,2,3", help="seeds of the trainings (%(default)s)")
    add("--layout", type=Layout.parsed, default=Layout(), help="[tpT]ppPdpD[z1][nL], such as pp1dp4n2 (%(default)s)")
    add("--iterations", type=int, default=400, metavar="N", help="iterations of each run (%(default)s)")
    add("--interval", type=int, default=20, metavar="N", help="iterations between validations (%(default)s)")
    add("--evaluations", type=int, default=16, metavar="N", help="batches of each validation (%(default)s)")
    add_run_options(parser, RUNS, Path("results/grid"))
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the study; return the exit status of `scripts.study`."""
    parser = build_parser()
    options = parser.parse_args(argv)
    known = {"--models": MODELS, "--variants": VARIANTS}
    for flag, names in known.items():
        for name in getattr(options, flag[2:]).split(","):
            if name not in names:
                parser.error(f"{flag}: {name!r} is none of {', '.join(names)}")
    for text in options.texts.split(","):
        if text not in TEXTS and not Path(text).exists():
            parser.error(f"--texts: {text!r} is none of {', '.join(TEXTS)}, and no file or folder")
    if not all(seed.isdecimal() for seed in options.seeds.split(",")):
        parser.error("--seeds: give whole numbers")
    if options.interval < 1 or options.iterations < LAST * options.interval or options.evaluations < 1:
        parser.error(
            f"--iterations, --interval, --evaluations: a run needs {LAST} validations, each of a batch or more"
        )
    return run_command(lambda: study(options), KEPT)


def study(options: argparse.Namespace) -> int:
    """Make the missing runs, then show the table of all runs in the file."""
    failed = missing_made(options, lambda: make_runs(options))
    rows = read_rows(options.rows, COLUMNS)
    cells = compared(rows)
    print(printed([losses(cells), verdicts(cells)], "table"), end="")
    return 1 if failed else 0


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One run of the grid."""

    model: str
    text: str
    variant: str
    training: Training
    data: PreparedData
    interval: int
    """Iterations between validations."""

    @property
    def ours(self) -> list[str]:
        """Our flags."""
        return words_of(_MODES.get(self.variant, ("", self.variant))[1], self.training)

    @property
    def script(self) -> list[str]:
        """The training script with its arguments; empty: the package's own entry point."""
        mode = _MODES.get(self.variant, ("plain", ""))[0]
        own = f"scripts/study/experts.py {mode}" if self.training.model.expert_parallel else ""
        return SCRIPTS.get(self.variant, own).split()

    @property
    def asked(self) -> list[str]:
        """Tags of the classes of traffic that the variant compresses.

        Raises:
            FlagError: a flag cannot work on this layout.
        """
        config = self.training.config_of(self.ours, ignore_others=self.variant in CONTROLS)
        return [traffic.tag for traffic in CLASSES if config.format_of(traffic) != "dense"]

    @property
    def flags(self) -> list[str]:
        """The training script, Megatron's flags, and ours."""
        return [
            *self.script, *self.training.megatron_flags(self.data), "--eval-interval", str(self.interval), *self.ours,
        ]  # fmt: skip

    def key(self, text_hash: str, cpu: str) -> dict[str, str]:
        """Return the columns of the file that tell this run from others, as text."""
        settings = shlex.join([*self.training.flags(), "--eval-interval", str(self.interval)])
        return {
            "model": self.model, "layout": str(self.training.layout), "text": self.text,
            "iterations": str(self.training.iterations), "seed": str(self.training.seed), "variant": self.variant,
            "cpu": cpu, "text_hash": text_hash[:12], "flags": shlex.join([*self.script, *self.ours]),
            "settings": hashlib.sha256(settings.encode()).hexdigest()[:12],
        }  # fmt: skip


def wanted_runs(options: argparse.Namespace) -> list[Wanted]:
    """Return all runs of the grid, seed by seed, so that pairs are complete as early as possible.

    Raises:
        ExperimentError, DataError, FlagError: a text, a layout or a variant's flags cannot work. Nothing was trained.
    """
    runs = []
    for seed, text, model in itertools.product(
        map(int, options.seeds.split(",")), options.texts.split(","), options.models.split(",")
    ):
        training = Training(
            model=shrunk(MODELS[model]) if options.tiny else MODELS[model], layout=options.layout,
            iterations=options.iterations, evaluation_iterations=options.evaluations, seed=seed,
        )  # fmt: skip
        source, name = TEXTS.get(text) or text_of(Path(text)), Path(text).stem
        data = source.prepared(options.output / f"text-{name}", training.model.vocabulary, options.max_mb)
        training.check(data)
        for variant in options.variants.split(","):
            runs.append(Wanted(model, name, variant, training, data, options.interval))
            if variant in _MODES and not training.model.expert_parallel:
                raise ExperimentError(f"--variants {variant}: {model} has no experts. Leave it out, or give moe-ep2")
            _ = runs[-1].asked  # flags that cannot work are refused here
    return runs


def make_runs(options: argparse.Namespace) -> int:
    """Train the runs that the file lacks; return the number of runs that failed."""
    failed, cpu = 0, kind_of_cpu()
    for wanted in wanted_runs(options):
        runs = Runs(options.output / "runs", hash_of(wanted.data), options.timeout, options.retry)
        key = wanted.key(runs.text, cpu)
        if any(key.items() <= row.items() for row in read_rows(options.rows, COLUMNS)):
            continue
        name = "-".join(key[part] for part in ("model", "text", "layout", "iterations", "variant", "seed"))
        training = wanted.training
        try:
            row = runs.made(
                name, training.processes, wanted.flags, training.seed,
                partial(measured, asked=wanted.asked), beside=training.layout.beside,
            )  # fmt: skip
        except RunFailed as failure:
            failed += 1
            print(f"{name}: failed: {failure} ({failure.log})", file=sys.stderr)
            continue
        add_row(options.rows, key | {each: row[each] for each in COLUMNS if each not in key}, COLUMNS)
        shutil.rmtree(runs.folder / name)
    return failed


def shrunk(model: Model) -> Model:
    """Return a model of the same architecture that trains in seconds, for tests."""
    return dataclasses.replace(
        model, layers_per_stage=1, hidden=128, heads=2, sequence=32, vocabulary=512, micro_batch=1
    )


def measured(folder: Path, asked: Sequence[str] = ()) -> dict[str, Any]:
    """Return the measurements of a run, from its log; `asked` are the tags of the classes that it compresses.

    Raises:
        RunFailed: the run validated less than four times, or the log shows no compressed bytes of a class.
    """
    record = read_logs(folder)
    validation, sent = record.validation, {share.name: share for share in shares(record)}
    if len(validation.values) < LAST:
        raise RunFailed(f"{len(validation.values)} validations, {LAST} are needed", folder / "log.txt")
    lines = lines_in(folder)
    # FSDP2's exchanges are not in the log's bytes; the adapter says once that it codes them.
    coded = {DP_GRADIENTS.tag} if any("FSDP2 reduces gradients in int" in line for line in lines) else set()
    if dense := [tag for tag in asked if tag not in coded and (tag not in sent or sent[tag].sent >= sent[tag].raw)]:
        raise RunFailed(f"the log shows no compressed bytes of {', '.join(dense)}", folder / "log.txt")
    total = sent.get("all traffic")
    loads = [float(load) for line in lines for load in _LOAD.findall(line)]
    return {
        "loss": round(statistics.fmean(validation.values[-LAST:]), 6),
        "validations": " ".join(
            f"{iteration}:{loss:.6f}" for iteration, loss in zip(validation.iterations, validation.values, strict=True)
        ),
        "bytes": round(total.sent / total.raw, 4) if total and total.raw else "",
        "seconds": round(record.seconds.median, 3),
        "load": round(statistics.fmean(loads), 4) if loads else "",
    }


def kind_of_cpu() -> str:
    """Return the widest instruction set that torch uses here, and a hash of all that the CPU has."""
    import torch

    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    flags = found[0].split(":")[1].split() if found else []
    return (
        f"{torch.backends.cpu.get_cpu_capability()}-{hashlib.sha256(' '.join(sorted(flags)).encode()).hexdigest()[:6]}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
