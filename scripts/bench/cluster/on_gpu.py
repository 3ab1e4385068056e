"""Seconds of the cluster benchmark on one GPU (`--device gpu`): its hosts share the GPU, over NCCL and shaped links.

The runs are planned (gpu.toml); finished ones are rows of a CSV file and are not repeated, so that a command goes on
where the last one stopped.
"""

import os
import statistics
import subprocess
import tomllib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from optimus_cc_ext.metrics.traffic import BETWEEN_NODES
from optimus_cc_ext.tools.report.table import Table
from scripts.bench.cluster.rates import Plan
from scripts.bench.cluster.results import payload, share_recovered
from scripts.bench.cluster.run import Iteration, Run, free_coding, train
from scripts.experiments.models import MODELS, Layout, Model, Training
from scripts.experiments.runs import add_row, commit, read_rows
from scripts.experiments.variants import CLUSTER, VANILLA, flags_of, papers_ranks
from scripts.hosts import gpus
from scripts.hosts.network import UNSHAPED

ROWS = Path(__file__).resolve().parents[3] / "docs" / "gpu-seconds.csv"
RATES = (UNSHAPED, "10gbit", "5gbit", "1gbit")
RIVAL, BALANCED, FREE = "vanilla-bf16", "balanced", "free-coding"
"""Names of variants: vanilla that reduces gradients in bf16; `balanced`; `balanced` whose encoding and decoding take
no time.
"""

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
TINY: dict[str, Any] = {"hidden": 128, "heads": 4, "sequence": 64, "vocabulary": 512, "micro_batch": 1}
"""Size of all models in a dry run."""

_ITERATIONS = {"5gbit": 4, "1gbit": 3}
"""Measured iterations at the slow rates; 5 at others."""

_WARM_UP, _SCHEDULE, _MISSING, _CPU = 3, 200, "missing", "CPU"
_BYTES_PER_WEIGHT = 64
"""Bytes of GPU memory for each weight of a model: parameters, gradients, optimizer and activations of four ranks."""

_KEY = ("model", "layout", "variant", "rate", "queues", "flags", "gpu")
COLUMNS = (
    *_KEY, "iterations", "median ms", "fastest ms", "slowest ms", "loss", "after iterations", "kernel MB", "log MB",
    "driver", "nccl", "torch", "at the same time", "commit", "command",
)  # fmt: skip
_SHOWN = (*_KEY[:5], "ms", "spread", "of vanilla's", "of bf16's", "of the bound", "loss", "MB", "MB logged")
_NOTE = "Medians; of vanilla's, of vanilla's with gradients in bf16; of the bound: the share of what free coding saves."
_FLAGS = "--mock-data --tokenizer-type NullTokenizer --overlap-grad-reduce --overlap-param-gather --vocab-size"


@dataclass(frozen=True)
class Slice:
    """Runs that belong together, as in gpu.toml."""

    model: str
    layout: str
    variants: Sequence[str]
    rates: Sequence[str]
    queues: str = ""

    def command(self, variant: str, rates: Sequence[str]) -> str:
        """Return the command that measures a variant at some rates."""
        command = f"{QUEUES}={self.queues} " * bool(self.queues) + "python -m scripts.bench.cluster --device gpu"
        return f"{command} --models {self.model} --layouts {self.layout} --variants {variant} --rates {','.join(rates)}"

    def key(self, variant: str, rate: str, gpu: str) -> dict[str, str]:
        """Return what tells a row from all others; its flags are those of the preset for free coding."""
        hidden = TINY["hidden"] if gpu == _CPU else MODELS[self.model].hidden
        text = CLUSTER[BALANCED if variant == FREE else variant]
        flags = " ".join(flags_of(text, Layout.parsed(self.layout), papers_ranks(hidden)))
        return dict(zip(_KEY, (self.model, self.layout, variant, rate, self.queues, flags, gpu), strict=True))


SLICES: dict[str, list[Slice]] = {
    name: [Slice(**each) for each in planned]
    for name, planned in tomllib.loads(Path(__file__).with_name("gpu.toml").read_text(encoding="utf-8")).items()
}


def measure(options: Namespace) -> str:
    """Make the runs that have no row yet, keep their rows, and return the table of all.

    Raises:
        RunFailed: a run failed; the rates that it finished are kept.
        OptimusError: the GPU cannot be used, or has too little memory.
    """
    wanted, dry = _wanted(options), options.dry_run_on_cpu
    path = options.output / "dry-run.csv" if dry else options.rows
    if not options.show:
        most = max(Training(model=MODELS[each.model]).parameters for each in wanted)
        machine = {"gpu": _CPU} if dry else _machine(most * _BYTES_PER_WEIGHT)
        path.parent.mkdir(parents=True, exist_ok=True)
        with gpus.together() if not dry else nullcontext(False) as together:
            machine |= {"at the same time": "yes" if together else "no", "commit": commit()}
            # Runs that need another value of CUDA_DEVICE_MAX_CONNECTIONS are listed as missing, with their command.
            here = [each for each in wanted if dry or each.queues == os.environ.get(QUEUES, "")]
            runs = [(each, variant) for each in here for variant in each.variants]
            for each, variant in _rehearsed(runs) if dry else runs:
                made = [tuple(row[name] for name in _KEY) for row in read_rows(path, COLUMNS)]
                keys = [each.key(variant, rate, machine["gpu"]) for rate in each.rates]
                if left := [key for key in keys if tuple(key.values()) not in made]:
                    _measure(each, variant, left, options, path, machine)
    return _shown(wanted, read_rows(path, COLUMNS), dry=dry)


def _wanted(options: Namespace) -> list[Slice]:
    if not options.layouts:
        return [each for name in options.only or SLICES for each in SLICES[name]]
    further = options.variants, options.rates or RATES, os.environ.get(QUEUES, "")
    return [Slice(model, f"{each}", *further) for model in options.models or ["gpt-1b"] for each in options.layouts]


def _rehearsed(runs: Sequence[tuple[Slice, str]]) -> Iterator[tuple[Slice, str]]:
    """Yield the runs that a dry run makes: one run of each variant, and one compressed run of each model in each
    layout.
    """
    seen: set[object] = set()
    for each, variant in runs:
        shown = {variant} | ({(each.model, each.layout)} if variant not in (VANILLA, RIVAL) else set())
        if shown - seen:
            yield each, variant
        seen |= shown


def _measure(
    each: Slice, variant: str, keys: Sequence[dict[str, str]], options: Namespace, path: Path, machine: dict[str, Any]
) -> None:
    layout, dry, flags = Layout.parsed(each.layout), options.dry_run_on_cpu, keys[0]["flags"]
    counts = {key["rate"]: 1 if dry else _ITERATIONS.get(key["rate"], 5) for key in keys}
    # The first iteration at a rate is not measured, because the rate is set while it runs.
    rates = [UNSHAPED] * _WARM_UP + [rate for rate, count in counts.items() for _ in range(count + 1)]
    training = Training(
        model=fitted(MODELS[each.model], layout, dry=dry), layout=layout, iterations=len(rates), schedule=_SCHEDULE,
        learning_rate=1e-4, evaluation_iterations=0, device="cpu" if dry else "cuda",
    )  # fmt: skip
    script = free_coding() if variant == FREE else []
    words = [*script, *training.flags(), *_FLAGS.split(), str(training.model.vocabulary), *flags.split()]
    folder = options.output / "runs" / "-".join((each.model, each.layout, variant, keys[0]["rate"], each.queues or "0"))
    print(f"{each.model}, {layout}, {variant}: {flags or 'no flags of ours'}", flush=True)
    run, plan = Run(each.model, each.layout, variant, 0, flags.split()), Plan(rates, _WARM_UP)
    try:
        seconds, device = 60 * options.timeout, training.device
        train(run, layout, words, folder, plan, seconds=seconds, device=device, on_iteration=_tell)
    finally:
        for key in keys:
            measured = [one for one in run.iterations if one.measured and one.rate == key["rate"]]
            if len(measured) >= counts[key["rate"]]:
                about = machine | {"command": each.command(variant, [key["rate"]])}
                add_row(path, key | about | _measured(measured), COLUMNS)


def _tell(iteration: Iteration) -> None:
    print(f"  {iteration.rate:>7} {iteration.seconds:8.3f} s", flush=True)


def fitted(model: Model, layout: Layout, *, dry: bool) -> Model:
    """Return a model, whose record is for two stages and two replicas, as deep and with as many sequences on `layout`;
    a tiny one in a dry run.
    """
    if dry:
        model = replace(model, layers_per_stage=2, micro_batches=2, **TINY)
    layers, batches = 2 * model.layers_per_stage // layout.stages, 2 * model.micro_batches // layout.replicas
    return replace(model, layers_per_stage=layers, micro_batches=batches)


def _measured(iterations: Sequence[Iteration]) -> dict[str, Any]:
    ms = [round(1e3 * each.seconds, 1) for each in iterations]
    # Where each rank is a node, the log does not sum up what leaves the nodes.
    logged = [one.traffic.get(BETWEEN_NODES) or [sum(sent for sent, _ in one.traffic.values())] for one in iterations]
    return {
        "iterations": len(ms), "median ms": statistics.median(ms), "fastest ms": min(ms), "slowest ms": max(ms),
        "loss": iterations[-1].loss, "after iterations": iterations[-1].number,
        "kernel MB": round(payload(iterations) / 1e6, 1),
        "log MB": round(statistics.median(each[0] for each in logged) / 1e6, 1),
    }  # fmt: skip


def _shown(wanted: Sequence[Slice], rows: Sequence[dict[str, str]], *, dry: bool) -> str:
    """Return the table of the wanted rows that exist, the newest of several, and below it the commands of those that
    are missing. In a dry run all seconds are missing.
    """
    known = {tuple(row[name] for name in _KEY[:5]): row for row in rows}
    cells, missing = [], []
    for each in wanted:
        for variant in each.variants:
            found = {rate: known.get((each.model, each.layout, variant, rate, each.queues)) for rate in each.rates}
            if left := [rate for rate, row in found.items() if dry or not row]:
                missing.append(f"{_MISSING}: {each.command(variant, left)}")
            for row in filter(None, found.values()):
                said = [_MISSING] * 5 if dry else _compared(row, known)
                loss = f"{row['loss']} after {row['after iterations']}"
                cells.append((*(row[name] for name in _KEY[:5]), *said, loss, row["kernel MB"], row["log MB"]))
    return "\n".join([Table(_SHOWN, cells, note=_NOTE).markdown(), *missing])


def _compared(row: dict[str, str], known: dict[tuple[str, ...], dict[str, str]]) -> list[Any]:
    """Return a row's milliseconds, their spread, and what they are of vanilla's, of its rival's and of free coding."""
    ends = [row[name] for name in _KEY[:2]], [row[name] for name in _KEY[3:5]]
    others = (known.get((*ends[0], name, *ends[1])) for name in (VANILLA, RIVAL, FREE))
    vanilla, rival, free = (float(one["median ms"]) if one and one["gpu"] == row["gpu"] else None for one in others)
    ours = float(row["median ms"])
    bound = share_recovered(vanilla, ours, free) if vanilla and free and row["variant"] == BALANCED else None
    spread = f"{row['fastest ms']} to {row['slowest ms']}"
    return [ours, spread, vanilla and ours / vanilla, rival and ours / rival, bound]


def _machine(needed: int) -> dict[str, Any]:
    gpus.require(needed)
    asked = ["nvidia-smi", "--id=0", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return dict(zip(("gpu", "driver", "nccl", "torch"), (*found, nccl, torch.__version__), strict=True))
