"""Study of each format's effect on the gradients of a mixture of experts, on one batch with equal weights.

    python -m scripts.study.tokens

From the weights that vanilla has at some points of a training of 2 layers with 8 experts on 2 ranks, at a learning rate
of 0, the same batch is passed through Megatron's real loop, dense and with each format on each of the four ways of a
token. The table has the relative error of all gradients and of those of routed experts, and the share of the
assignments of tokens to experts that change, by layer. Finished runs are not repeated.
"""

import argparse
import dataclasses
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from optimus_cc_ext.config.classes import EXPERT_DISPATCH, EXPERT_GRADIENT
from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.report.document import ReportDocument
from optimus_cc_ext.tools.report.table import Table
from scripts.experiments.models import MODELS, Layout, Training
from scripts.experiments.runs import Runs
from scripts.experiments.texts import hash_of
from scripts.study.__main__ import KEPT, add_common_options, points_of, prepared

MODEL = dataclasses.replace(MODELS["moe-ep2"], hidden=128, vocabulary=1024)
WAYS = ("dispatch-forward", "combine-forward", "dispatch-backward", "combine-backward")
SETTINGS = {
    **{f"{form}, {way}": (form, way) for form in EXPERT_DISPATCH.block_formats for way in WAYS},
    **{f"{form}, all": (form, ",".join(WAYS)) for form in EXPERT_DISPATCH.block_formats},
    "int8, DeepSeek-V3's ways": ("int8", "dispatch-forward,combine-backward"),
}
"""Format and compressed ways of each setting. DeepSeek-V3 sends the results of the experts in bf16, and the gradients
to the tokens, too (arXiv 2412.19437, 3.3.3).
"""

_WAYS_PY = str(Path(__file__).with_name("ways.py"))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.tokens", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--points", default="3,110,600", help="iterations of the training after which weights are taken (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--match", default="", metavar="REGEX", help="only settings, such as 'int8, all', that match")
    add_common_options(parser, Path("results/tokens"))
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the study; return the exit status of `scripts.study`."""
    parser = build_parser()
    options = parser.parse_args(argv)
    points = points_of(parser, options.points)
    return run_command(lambda: study(options, points), KEPT)


def study(options: argparse.Namespace, points: Sequence[int]) -> int:
    """Train to each point, then compare; show the table."""
    training = Training(
        model=MODEL, layout=Layout(stages=1), iterations=points[-1], seed=options.seed, evaluation_iterations=0
    )
    data = prepared(options, training)
    runs = Runs(options.output / "runs", hash_of(data), options.timeout, options.retry)
    rows = []
    for point in points:
        saved = (runs.folder / f"training-{point}" / "save").absolute()
        saving = ["--save", str(saved), "--save-interval", str(point), "--exit-interval", str(point)]
        flags = [*training.megatron_flags(data), *saving, "--ckpt-format", "torch_dist", "--no-save-optim"]
        runs.made(saved.parent.name, training.processes, flags, training.seed, lambda folder: {})
        fixed = dataclasses.replace(training, iterations=1, learning_rate=0.0, seed=training.seed + 1)
        dense = (runs.folder / f"{point}-dense").absolute()
        chosen = {name: each for name, each in SETTINGS.items() if re.search(options.match, name)}
        settings = {"dense": ("dense", "")} | (dict(list(chosen.items())[:1]) if options.tiny else chosen)
        for setting, (form, ways) in settings.items():
            folder = (runs.folder / f"{point}-{setting}".replace(", ", "-").replace("'", "")).absolute()
            flags = [
                _WAYS_PY, ways, str(folder), *fixed.megatron_flags(data),
                EXPERT_DISPATCH.format_flag, form, EXPERT_GRADIENT.format_flag, form,
                "--load", str(saved), "--ckpt-step", str(point), "--ckpt-format", "torch_dist", "--finetune",
                "--no-load-optim", "--no-load-rng", "--save", str(folder / "save"), "--no-save-optim",
                "--save-wgrads-interval", "1", "--save-interval", "2",
            ]  # fmt: skip
            read = (lambda folder: {}) if setting == "dense" else lambda folder, dense=dense: against(folder, dense)
            found = runs.made(folder.name, fixed.processes, flags, fixed.seed, read)
            if setting != "dense":
                rows.append((point, setting, *(100 * value for value in (*found["errors"], *found["changed"]))))
    layers = [f"changed in layer {layer}, %" for layer in range(training.layers)]
    columns = ("weights of", "setting", "error, %", "error of routed experts, %", *layers)
    note = "Changed: assignments of tokens to experts that the dense run does not have."
    table = Table(columns, rows, "Gradients against dense ones", note, name="tokens")
    document = ReportDocument("", "", [table], files=[runs.rows()])
    print(document.markdown())
    document.write(options.output, markdown="tokens.md")
    return 0


def against(folder: Path, dense: Path) -> dict[str, Any]:
    """Compare a setting with the dense run: errors of all gradients and of routed experts, and changed assignments by
    layer; delete the gradients.
    """
    ours, exact = load(folder), load(dense)
    routes, exact_routes = (
        [torch.load(file, weights_only=True) for file in sorted(each.glob("routes*.pt"))] for each in (folder, dense)
    )
    layers = len(exact_routes[0]) // MODEL.micro_batches
    shutil.rmtree(folder / "save")
    return {
        "errors": [error(ours, exact, ""), error(ours, exact, ".experts.")],
        "changed": [
            changed([rank[layer::layers] for rank in routes], [rank[layer::layers] for rank in exact_routes])
            for layer in range(layers)
        ],
    }


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Load the gradients of a run's first iteration; those of experts by their rank, too."""
    found = {}
    for file in sorted(folder.glob("save/wgrads/iter_*/mp_rank_*.pth")):
        for chunk in torch.load(file, weights_only=True).values():
            for name, gradient in chunk.items():
                found[f"{file.stem}{name}" if ".experts." in name else name] = gradient.double().flatten()
    if not found:
        raise ValueError(f"{folder}: the run has written no gradients")
    return found


def error(ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], named: str) -> float:
    """Return the relative error of all gradients whose names contain `named`."""
    names = [name for name in exact if named in name]
    lost, whole = (sum(float(each.square().sum()) for each in parts) for parts in (
        (ours[name] - exact[name] for name in names), (exact[name] for name in names)
    ))  # fmt: skip
    return float((lost / whole) ** 0.5)


def changed(ours: list[list[torch.Tensor]], exact: list[list[torch.Tensor]]) -> float:
    """Return the share of the assignments, by rank and micro-batch, that the dense run does not have."""
    pairs = [pair for mine, other in zip(ours, exact, strict=True) for pair in zip(mine, other, strict=True)]
    return sum(int((mine & ~other).sum()) for mine, other in pairs) / sum(int(other.sum()) for _, other in pairs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
