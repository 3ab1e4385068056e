"""Study of each format's effect on the steps of Adam and Muon, by kind of parameter, on equal weights.

    python -m scripts.study.kinds --models llama,moe

From the weights that vanilla has at some points of a training, at a learning rate of 0, the same batches are passed
through Megatron's real loop, dense and with data-parallel gradients in each format. The table compares, by kind of
matrix: the gradients of all iterations; the step that Adam makes of them after the last iteration; the root of Adam's
second moment, by which a step is divided; and Muon's step, the orthogonalised momentum of the whole matrix, which the
vocabulary does not get. Each is a relative error, |ours - dense| / |dense|. Finished runs are not repeated.
"""

import argparse
import dataclasses
import math
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.cpu.shared_gpu import Device
from optimus_cc_ext.tools.data import PreparedData
from optimus_cc_ext.tools.report.document import ReportDocument
from optimus_cc_ext.tools.report.table import Table
from scripts.experiments.models import MODELS, Training, device_here
from scripts.experiments.runs import Runs
from scripts.experiments.texts import hash_of
from scripts.study.__main__ import KEPT, add_common_options, points_of, prepared
from scripts.study.gradients import DENSE, from_weights, kept, training_flags
from scripts.study.grid import shrunk

FORMATS = ("int4", "int5", "int6", "int8")
KINDS = {
    "router": r"\.router\.", "experts": r"\.experts\.", "attention": r"self_attention", "MLP": r"\.mlp\.",
    "vocabulary": r"word_embeddings|output_layer",
}  # fmt: skip
"""Pattern of the names of each kind's matrices; the first that matches counts."""

BETAS, EPSILON = (0.9, 0.95), 1e-8
"""Adam's settings in the study's trainings."""

MOMENTUM, NEWTON_SCHULZ, STEPS = 0.9, (3.4445, -4.7750, 2.0315), 5
"""Muon's settings that Megatron's flags have by default: momentum, coefficients of the iteration, and its steps."""

Gradients = list[dict[str, torch.Tensor]]
"""Gradients of all matrices by name, in fp32, iteration by iteration."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of `python -m scripts.study.kinds`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.kinds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", default="llama,moe", help="models, of gpt, llama, llama-350m, moe (%(default)s)")
    add("--formats", default=",".join(FORMATS), help="formats of the gradients (%(default)s)")
    add("--points", default="20,160", help="iterations of the training after which weights are taken (%(default)s)")
    add("--iterations", type=int, default=8, metavar="N", help="iterations that are compared (%(default)s)")
    add("--seed", type=int, default=1)
    add_common_options(parser, Path("results/kinds"))
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the study; return the exit status of `scripts.study`."""
    parser = build_parser()
    options = parser.parse_args(argv)
    points = points_of(parser, options.points)
    for name in options.models.split(","):
        if name not in MODELS:
            parser.error(f"--models: {name!r} is none of {', '.join(MODELS)}")
    for name in options.formats.split(","):
        if name not in FORMATS:
            parser.error(f"--formats: {name!r} is none of {', '.join(FORMATS)}")
    if options.iterations < 1:
        parser.error("--iterations: give a whole number of at least 1")
    return run_command(lambda: study(options, points), KEPT)


def study(options: argparse.Namespace, points: Sequence[int]) -> int:
    """Train each model once, then compare; show the table."""
    rows, formats = [], options.formats.split(",")
    for name in options.models.split(","):
        model = shrunk(MODELS[name]) if options.tiny else MODELS[name]
        training = Training(model=model, iterations=points[-1], seed=options.seed, evaluation_iterations=1)
        training = dataclasses.replace(training, device=device_here(training.processes))
        runs = Runs(options.output / name, "", options.timeout, options.retry, training.device)
        for point, errors in coded_from_weights(
            training, prepared(options, training), runs, points, formats, options.iterations, compare
        ):
            kinds = [kind for kind in KINDS if kind in errors[formats[0]]]
            rows += [
                (name, point, kind, *(e and 100 * e for form in formats for e in errors[form][kind])) for kind in kinds
            ]
    measures = ("gradient", "step", "second moment", "Muon's step")
    columns = ("model", "weights of", "kind", *(f"{form}: {each}, %" for form in formats for each in measures))
    note = f"The optimizers have seen the gradients of {options.iterations} iterations. Second moment: its root."
    table = Table(columns, rows, "Errors by kind of matrix", note, name="kinds")
    document = ReportDocument("", "", [table])
    print(document.markdown())
    document.write(options.output, markdown="kinds.md")
    return 0


def coded_from_weights(
    training: Training, data: PreparedData, runs: Runs, points: Sequence[int], formats: Sequence[str], iterations: int,
    compare: Callable[[Gradients, Gradients], dict[str, Any]],
) -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:  # fmt: skip
    """Train once, then pass `iterations` batches at a learning rate of 0 through the weights of each point, with
    gradients in each format; yield the point, and what `compare` says of each format's gradients and the dense ones.

    Raises:
        ExperimentError: the text is too short.
        RunFailed: a run failed, now or before.
    """
    training.check(data)
    runs = dataclasses.replace(runs, text=hash_of(data))
    checkpoints = (runs.folder / "training" / "save").absolute()
    flags = training_flags(training, data, checkpoints, points)
    runs.made("training", training.processes, flags, training.seed, lambda folder: {})
    fixed = dataclasses.replace(training, iterations=iterations, learning_rate=0.0, seed=training.seed + 1)
    for point in points:
        dense = (runs.folder / f"{point}-{DENSE}").absolute()
        found = {}
        for form in (DENSE, *formats):
            folder = (runs.folder / f"{point}-{form}").absolute()
            script = [] if form == DENSE else ["scripts/study/in_formats.py", form, form]
            ours = [] if form == DENSE else ["--dp-compression-format", "int4"]
            flags = [
                *script, *fixed.megatron_flags(data), *ours, *from_weights(checkpoints, point, folder, iterations)
            ]  # fmt: skip
            read = partial(against, dense=dense, compare=compare, device=compared_on(training.device))
            found[form] = runs.made(folder.name, fixed.processes, flags, fixed.seed, kept if form == DENSE else read)
        yield point, found


def compared_on(device: Device) -> str:
    """Return the device on which gradients are compared: the GPU if the training ran on one, else the CPU."""
    return "cpu" if device == "cpu" else "cuda"


def against(
    folder: Path, dense: Path, compare: Callable[[Gradients, Gradients], dict[str, Any]], device: str = "cpu"
) -> dict[str, Any]:
    """Return what `compare` says of a run's gradients and the dense ones; delete the gradients."""
    errors = compare(load(folder, device), load(dense, device))
    shutil.rmtree(folder / "save")
    return errors


def load(folder: Path, device: str = "cpu") -> Gradients:
    """Load the gradients of the first replica's matrices onto `device`, iteration by iteration."""
    found: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for file in sorted(folder.glob("save/wgrads/iter_*/mp_rank_*.pth")):
        iteration = int(file.parent.name.removeprefix("iter_"))
        for chunk in torch.load(file, map_location=device, weights_only=True).values():
            found[iteration] |= {f"{file.stem} {name}": each.float() for name, each in chunk.items() if each.dim() > 1}
    return [found[iteration] for iteration in sorted(found)]


def compare(ours: Gradients, dense: Gradients) -> dict[str, list[float | None]]:
    """Return four relative errors for each kind of matrix: of the gradients, of Adam's last step, of the root of Adam's
    second moment, and of Muon's last step. The fourth is None for the vocabulary, which Muon does not step.

    Raises:
        ValueError: the two runs do not have gradients of the same iterations and matrices.
    """
    if not dense or [each.keys() for each in ours] != [each.keys() for each in dense]:
        raise ValueError("the two runs have not made gradients of the same iterations and matrices")
    named = defaultdict(list)
    for name in dense[0]:
        named[kind_of(name)].append(name)
    return {
        kind: [
            error(((mine[name], exact[name]) for name in names for mine, exact in zip(ours, dense, strict=True))),
            *(error(pairs) for pairs in zip(*(_steps(ours, dense, name) for name in names), strict=True)),
            None if kind == "vocabulary" else error(
                tuple(muon([iteration[name] for iteration in run]) for run in (ours, dense)) for name in names
            ),
        ]
        for kind, names in named.items()
    }  # fmt: skip


def kind_of(name: str) -> str:
    """Return the kind of the matrix of this name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def _steps(ours: Gradients, dense: Gradients, name: str) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return the pairs, of both runs, of Adam's last step and of the root of its second moment for one matrix."""
    mine, exact = (adam([iteration[name] for iteration in run]) for run in (ours, dense))
    return tuple(zip(mine, exact, strict=True))


def adam(gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Adam's step after these gradients, at a learning rate of 1, and the root of its second moment."""
    first, second = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for gradient in gradients:
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square(), 1 - BETAS[1])
    corrections = [1 - beta ** len(gradients) for beta in BETAS]
    root = second.div_(corrections[1]).sqrt_()
    return first.div_(corrections[0]) / (root + EPSILON), root


def muon(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return Muon's step after these gradients, at a learning rate of 1: their momentum with singular values near 1."""
    momentum = torch.zeros_like(gradients[0])
    for gradient in gradients:
        momentum.lerp_(gradient, 1 - MOMENTUM)
    step = momentum / momentum.norm().clamp(min=1e-30)  # an expert without tokens has no gradient
    for _ in range(STEPS):
        first, third, fifth = NEWTON_SCHULZ
        gram = step @ step.T
        step = first * step + (third * gram + fifth * gram @ gram) @ step
    return step


def error(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return |ours - exact| / |exact| of all tensors together."""
    lost = whole = 0.0
    for mine, exact in pairs:
        lost += float((mine - exact).double().square().sum())
        whole += float(exact.double().square().sum())
    return math.sqrt(lost / whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
