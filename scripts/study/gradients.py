"""Study of each format's effect on the gradients of the weights, without the noise of a training.

    python -m scripts.study.gradients

From the weights that vanilla has at some points of a training, at a learning rate of 0, the same batches are passed
through Megatron's real loop, dense and with each setting. Three things are compared for the layers of each stage: an
iteration's gradients (relative error and cosine, means over the iterations), their sum over all iterations, and the
steps that Adam would make of them. Adam divides each weight's gradient by its root mean square, so small ones count.
Messages are studied on 4 stages with 16 micro-batches an iteration, replicas on 2 stages x 2 replicas with 8
micro-batches each. Finished runs are not repeated.
"""

import argparse
import dataclasses
import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.data import PreparedData
from optimus_cc_ext.tools.report.document import ReportDocument
from optimus_cc_ext.tools.report.record import read_logs, shares
from optimus_cc_ext.tools.report.table import Cell, Table
from scripts.experiments.models import MODELS, Layout, Training
from scripts.experiments.runs import Runs
from scripts.experiments.texts import hash_of
from scripts.experiments.variants import GRADIENTS
from scripts.hosts.launch import RunFailed
from scripts.study.__main__ import KEPT, add_common_options, points_of, prepared

DENSE = "dense"
KINDS = {
    "error, %": ("error", 100, ".2g"), "cosine": ("cosine", 1, ".3g"), "error of sum, %": ("error of sum", 100, ".2g"),
    "error of Adam's steps, %": ("error of steps", 100, ".2g"),
}  # fmt: skip
"""Kinds of figures that are shown by stage: name in a result, factor, and format of values below 10."""

_ADAM_EPSILON = 1e-8

Gradients = dict[tuple[int, int], torch.Tensor]
"""Gradients of a stage's layers, flat, fp32, by (iteration, stage)."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of `python -m scripts.study.gradients`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.gradients", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--points", default="20,80,320", help="iterations of the training after which weights are taken (%(default)s)"
    )
    parser.add_argument(
        "--iterations", type=int, default=4, metavar="N", help="iterations that are compared (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--match", default="", metavar="REGEX", help="only rows whose 'POINT CLASS SETTING' matches")
    add_common_options(parser, Path("results/gradients"))
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the study; return the exit status of `scripts.study`."""
    parser = build_parser()
    options = parser.parse_args(argv)
    points = points_of(parser, options.points)
    if options.iterations < 1:
        parser.error("--iterations: give a whole number of at least 1")
    return run_command(lambda: study(options, points), KEPT)


def study(options: argparse.Namespace, points: Sequence[int]) -> int:
    """Train once, then compare; show the comparisons that are there."""
    model = MODELS["test" if options.tiny else "gpt"]
    if options.tiny:
        model = dataclasses.replace(model, layers_per_stage=2)  # each of four stages gets one layer
    training = Training(model=model, iterations=points[-1], seed=options.seed, evaluation_iterations=1)
    data = prepared(options, training)
    runs = Runs(options.output / "runs", hash_of(data), options.timeout, options.retry)
    checkpoints = (runs.folder / "training" / "save").absolute()
    flags = training_flags(training, data, checkpoints, points)
    runs.made("training", training.processes, flags, options.seed, lambda folder: {})

    failed, rows = 0, []
    for point in points:
        for traffic, named in GRADIENTS.items():
            between_stages = traffic != "DP gradients"
            fixed = dataclasses.replace(
                training, iterations=options.iterations, learning_rate=0.0, seed=training.seed + 1,
                layout=Layout(stages=4, replicas=1) if between_stages else Layout(),
                model=dataclasses.replace(
                    model, layers_per_stage=model.layers_per_stage // (2 if between_stages else 1),
                    micro_batches=16 if between_stages else 8,
                ),
            )  # fmt: skip
            chosen = {
                name: flags for name, flags in named.items() if re.search(options.match, f"{point} {traffic} {name}")
            }
            if not chosen:
                continue
            stages = fixed.layout.stages
            for setting, ours in ({DENSE: ""} | chosen).items():
                # The dense run is the same for both directions between stages.
                kind = f"{stages}-stages" if setting == DENSE else traffic.replace(" ", "-")
                name = f"{kind}-{point}-{setting}".replace(", ", "-").replace(" ", "-")
                folder = (runs.folder / name).absolute()
                flags = [
                    *fixed.megatron_flags(data, folder / "tensorboard"), *ours.split(),
                    *from_weights(checkpoints, point, folder, fixed.iterations),
                ]  # fmt: skip
                dense = runs.folder / f"{stages}-stages-{point}-{DENSE}"
                read = kept if setting == DENSE else lambda folder, dense=dense: against(folder, dense)
                try:
                    found = runs.made(name, fixed.processes, flags, fixed.seed, read)
                except RunFailed as failure:
                    failed += 1
                    print(f"{name}: failed: {failure} ({failure.log})", file=sys.stderr)
                    if setting == DENSE:
                        break
                    continue
                if setting != DENSE:
                    sent, raw = found["bytes"][traffic]
                    rows.append((point, traffic, setting, 100 * sent / raw, *_cells(found)))
    names = [f"{kind}, stage {stage}" for kind in KINDS for stage in range(4)]
    table = Table(("weights of", "class", "setting", "sent, %", *names), rows, name="gradients")
    document = ReportDocument("", "", [by_setting(table)], files=[table, runs.rows()])
    print(document.markdown())
    document.write(options.output, markdown="gradients.md")
    return 1 if failed else 0


def training_flags(training: Training, data: PreparedData, checkpoints: Path, points: Sequence[int]) -> list[str]:
    """Return the flags of vanilla's training, which saves its weights at each of `points`."""
    return [
        *training.megatron_flags(data, checkpoints.parent / "tensorboard"),
        "--save", str(checkpoints), "--save-interval", str(math.gcd(*points)), "--ckpt-format", "torch_dist",
        "--eval-interval", str(2 * training.iterations), "--no-save-optim",
    ]  # fmt: skip


def from_weights(checkpoints: Path, point: int, folder: Path, iterations: int) -> list[str]:
    """Return the flags of a run that begins with the weights of iteration `point`, and writes its gradients down."""
    return [
        "--load", str(checkpoints), "--ckpt-step", str(point), "--ckpt-format", "torch_dist", "--finetune",
        "--no-load-optim", "--no-load-rng", "--save", str(folder / "save"), "--no-save-optim",
        "--save-wgrads-interval", "1", "--save-interval", str(2 * iterations),
        "--eval-interval", str(2 * iterations),
    ]  # fmt: skip


def kept(folder: Path) -> dict[str, Any]:
    """Keep only the gradients of a dense run."""
    for checkpoint in (folder / "save").glob("iter_*"):
        shutil.rmtree(checkpoint)
    return {}


def against(folder: Path, dense: Path) -> dict[str, Any]:
    """Compare a setting's gradients with the dense run's; return the errors and bytes, and delete the gradients."""
    found = compare(load(folder), load(dense))
    found["bytes"] = {share.name: [share.sent, share.raw] for share in shares(read_logs(folder))}
    shutil.rmtree(folder / "save")
    return found


def load(folder: Path) -> Gradients:
    """Load the gradients of the first replica that `--save-wgrads-interval` wrote in a run's folder."""
    found = {}
    for file in sorted(folder.glob("save/wgrads/iter_*/mp_rank_*.pth")):
        chunks = torch.load(file, weights_only=True).values()
        layers = [
            gradient.float().flatten() for chunk in chunks for name, gradient in chunk.items() if "layers" in name
        ]
        found[int(file.parent.name.removeprefix("iter_")), int(file.stem.split("_")[-1])] = torch.cat(layers)
    return found


def compare(ours: Gradients, dense: Gradients) -> dict[str, Any]:
    """Compare gradients stage by stage: mean relative error and cosine of an iteration's gradients, relative error of
    their sum over the iterations, and relative error of the steps that Adam would make.
    """
    if ours.keys() != dense.keys() or not ours:
        raise ValueError("the two runs have not made gradients of the same iterations and stages")
    iterations, stages = (sorted({key[place] for key in dense}) for place in (0, 1))
    found: dict[str, Any] = {name: [] for name, _, _ in KINDS.values()}
    for stage in stages:
        pairs = [(ours[iteration, stage].double(), dense[iteration, stage].double()) for iteration in iterations]
        errors = [_error(mine, exact) for mine, exact in pairs]
        cosines = [float(torch.cosine_similarity(mine, exact, dim=0)) for mine, exact in pairs]
        total, exact_total = (torch.stack(list(each)).sum(0) for each in zip(*pairs, strict=True))
        found["error"].append(sum(errors) / len(errors))
        found["cosine"].append(sum(cosines) / len(cosines))
        found["error of sum"].append(_error(total, exact_total))
        scale = torch.stack([exact for _, exact in pairs]).square().mean(0).sqrt() + _ADAM_EPSILON
        steps = [_error(mine / scale, exact / scale) for mine, exact in pairs]
        found["error of steps"].append(sum(steps) / len(steps))
    return found


def _error(mine: torch.Tensor, exact: torch.Tensor) -> float:
    return float((mine - exact).norm() / exact.norm())


def _cells(found: Mapping[str, Any]) -> list[float | None]:
    """Return the figures of each kind on four stages; None for stages and kinds that a result, maybe an older one,
    lacks.
    """
    return [
        scale * value if value is not None else None
        for name, scale, _ in KINDS.values()
        for value in [*found.get(name, ()), *[None] * 4][:4]
    ]


def by_setting(table: Table) -> Table:
    """Return the table for people: a row for each setting, the points of the training side by side, all stages in
    a cell.
    """
    points = table.distinct("weights of")
    rows: list[tuple[Cell, ...]] = []
    for traffic, setting in dict.fromkeys(zip(table.column("class"), table.column("setting"), strict=True)):
        found = table.where(**{"class": traffic, "setting": setting})
        cells = (_stages(found.where(**{"weights of": point}), kind) for point in points for kind in KINDS)
        rows.append((traffic, setting, found.column("sent, %")[0], *cells))
    columns = ("class", "setting", "sent, %", *(f"after {point}: {kind}" for point in points for kind in KINDS))
    note = "Of a stage's layers, without the embeddings: stages 0, 1 ... in a cell."
    return Table(columns, rows, "Gradients against dense ones", note)


def _stages(row: Table, kind: str) -> Cell:
    values = [value for stage in range(4) for value in row.numbers(f"{kind}, stage {stage}") if value == value]
    return ", ".join(format(value, ".0f" if value >= 10 else KINDS[kind][2]) for value in values) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
