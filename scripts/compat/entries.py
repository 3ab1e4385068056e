"""Entry scripts of Megatron-LM and its forks, trained for three iterations in vanilla and with us, as a table.

    scripts/compat_entries.sh CHECKOUT[:SCRIPT] ... [--ranks 4] [--modes vanilla off] [--limit SECONDS]

Each script runs in a process of its own, which imports the checkout's Megatron, and whose forks are the ranks.
"""

import argparse
import hashlib
import importlib.metadata
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from scripts.compat import sentences
from scripts.compat.forks import run_forks
from scripts.compat.small_lines import SMALL

MODES = {
    "vanilla": "", "off": "", "balanced": "--optimus-cc balanced --no-compression-trial",
    "paper": "--optimus-cc --compressed-backprop-rank 4 --dp-compression-rank 8",
}  # fmt: skip
# The mock data of versions before 0.17 have 4,096 words.
_FLAGS = "--train-iters 3 --global-batch-size 16 --pipeline-model-parallel-size 2 --vocab-size 5000"
_LAYERS = "--num-layers 4"
_KINDS = {
    "vlm": "--encoder-num-layers 2 --decoder-num-layers 4 --img-h 28 --img-w 28 --patch-dim 14 "
    "--dataloader-seq-length 64 --disable-vision-class-token --ckpt-format torch",
    "hybrid|mamba": "--spec scripts.compat.hybrid_local spec",
    "bert": f"{_LAYERS} --spec local",
    # Megatron's T5 has one stage only.
    "t5": "--pipeline-model-parallel-size 1 --encoder-num-layers 2 --decoder-num-layers 2 --decoder-seq-length 64",
}
"""Flags of scripts, by a part of their names; of all others, `_LAYERS`."""


def _flags(script: Path, folder: Path) -> list[str]:
    """Return Megatron's flags for a script. The data that it trains on are written to a folder."""
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    own = next((flags for part, flags in _KINDS.items() if re.search(part, script.name)), _LAYERS)
    if (
        "hybrid_local" in own
    ):  # Since 0.19 the pattern of a hybrid model says how many layers it has, and on which stage.
        pattern = "--hybrid-layer-pattern *-|*-", f"--hybrid-override-pattern *-*- {_LAYERS}"
        own += f" {pattern['--hybrid-layer-pattern' not in parser._option_string_actions]}"
    data = sentences.flags(folder) if re.search("bert|t5", script.name) else []
    without = ("--mock-data",) if data else ()
    return [*(flag for flag in SMALL if flag not in without), *shlex.split(f"{_FLAGS} {own}"), *data]


def _norms_of_torch() -> None:
    """Let Megatron's vision model, whose norms are Transformer Engine's, use those of torch that Megatron wraps."""
    import torch
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    defaults = CLIPViTModel.__init__.__defaults__
    CLIPViTModel.__init__.__defaults__ = tuple(
        WrappedTorchNorm if each is torch.nn.LayerNorm else each for each in defaults
    )


def _followed() -> Callable[[], str]:
    """Note every optimizer that is made; return a function that hashes their weights."""
    import torch

    made, init = [], torch.optim.Optimizer.__init__

    def noted(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]
        made.append(self)

    torch.optim.Optimizer.__init__ = noted  # type: ignore[method-assign, assignment]

    def weights() -> str:
        digest = hashlib.sha256()
        for group in (group for optimizer in made for group in optimizer.param_groups):
            for parameter in group["params"]:
                digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    return weights


def _rank(script: Path, flags: list[str], mode: str, notes: Path) -> None:
    import torch

    from optimus_cc_ext.startup import launch

    torch.set_num_threads(1)
    os.environ["OPTIMUS_CC_NODE"] = "ranks:1"
    weights = _followed()
    argv = [str(script), *flags, *shlex.split(MODES[mode])]
    if mode == "vanilla":
        sys.argv, sys.path[:0] = argv, [str(script.parent)]
        runpy.run_path(argv[0], run_name="__main__")
    else:
        launch(argv)
    notes.write_text(weights())


def train(script: Path, flags: list[str], mode: str, ranks: int, limit: float) -> dict[str, object]:
    """Train a script on forks of this process; return its losses, a hash of all ranks' weights, or the reason why
    there are none.
    """
    with tempfile.TemporaryDirectory(prefix="compat-entries-") as folder:
        here = Path(folder)
        logs, late = run_forks(ranks, here, lambda rank: _rank(script, flags, mode, here / f"weights-{rank}"), limit)
        weights = [path.read_text() for path in sorted(here.glob("weights-*"))]
    losses = [found for log in logs for found in re.findall(r"(?:lm |^|\W)loss: ([0-9.]+E[+-]\d+)", log)]
    if late or len(weights) < ranks or not losses:
        return {"reason": f"no end within {limit:g} s" if late else _reason(logs)}
    return {"losses": losses, "weights": hashlib.sha256("".join(weights).encode()).hexdigest()[:8]}


def _reason(logs: list[str]) -> str:
    """Return our error if there is one, else the last line of a traceback."""
    for pattern in (r"^optimus-cc: error: .*", r"^[\w.]*(?:Error|Exception)\b.*"):
        for log in logs:
            if found := re.findall(pattern, log, re.MULTILINE):
                return str(found[-1])[:300]
    return f"no loss; {' '.join(logs[0].split()[-30:])}"


def _one(target: str, modes: list[str], ranks: int, limit: float) -> str:
    """Train one script in every mode; return its row."""
    checkout, _, name = target.partition(":")
    script = Path(checkout).resolve() / (name or "pretrain_gpt.py")
    try:
        found = _trained(script, modes, ranks, limit)
    except ImportError as error:
        return f"| {Path(checkout).name} | {script.name} | Megatron cannot be imported here: {error} |"
    cells, vanilla = [], found.get("vanilla", {}).get("weights")
    for result in found.values():
        equal = vanilla is not None and result.get("weights") == vanilla
        losses = " ".join(f"{float(loss):.6g}" for loss in result.get("losses", ()))
        cells.append(f"{losses} ({'w' if equal else result.get('weights')})" if losses else str(result["reason"]))
    return f"| {Path(checkout).name} | {name or 'pretrain_gpt.py'} | {' | '.join(cells)} |"


def _trained(script: Path, modes: list[str], ranks: int, limit: float) -> dict[str, dict[str, object]]:
    from optimus_cc_ext.tools.cpu import cpu_runtime

    warnings.simplefilter("ignore")  # Megatron warns once per missing GPU library
    cpu_runtime.activate()
    import megatron.core.datasets
    import megatron.training.training

    # A checkout whose helper was not compiled takes that of the wheel.
    wheel = importlib.metadata.distribution("megatron-core").locate_file("megatron/core/datasets")
    megatron.core.datasets.__path__.append(str(wheel))
    import optimus_cc_ext.hooks.launching  # noqa: F401

    if "vlm" in script.name:
        _norms_of_torch()
    if "bert" in script.name:  # It imports this spec also where `--spec local` replaces it.
        from megatron.core.models.bert import bert_layer_specs

        bert_layer_specs.bert_layer_with_transformer_engine_spec = None
    found = {}
    with tempfile.TemporaryDirectory(prefix="compat-entries-") as folder:
        flags = _flags(script, Path(folder))
        for mode in modes:
            found[mode] = train(script, flags, mode, ranks, limit)
            if mode == "vanilla" and "reason" in found[mode]:
                break
    return found


def main() -> int:
    """Train every script, and print the table: losses, and a hash of the weights, or w if they are vanilla's."""
    parser = argparse.ArgumentParser(prog="scripts/compat_entries.sh", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", metavar="CHECKOUT[:SCRIPT]", help="a checkout, and a script in it")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default: %(default)d)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all of them")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a run (default: %(default)g)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # this process imports Megatron
    options = parser.parse_args()
    if options.alone:
        print(_one(options.targets[0], options.modes, options.ranks, options.limit))
        return 0
    print(f"| checkout | script | {' | '.join(options.modes)} |\n|---|---|{'---|' * len(options.modes)}", flush=True)
    for target in options.targets:
        checkout = str(Path(target.partition(":")[0]).resolve())
        alone = [sys.executable, "-P", "-m", "scripts.compat.entries", target, "--alone", "--ranks", str(options.ranks)]
        ended = subprocess.run(
            [*alone, "--limit", str(options.limit), "--modes", *options.modes], text=True, check=False,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{checkout}"},
        )  # fmt: skip
        rows = [line for line in ended.stdout.splitlines() if line.startswith("| ")]
        print(rows[-1] if rows else f"| {target} | | ended with status {ended.returncode} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
