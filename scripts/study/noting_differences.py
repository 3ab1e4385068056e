"""Training of the package's own entry point that measures what one step changes in the weights, in last places.

torchrun ... -m optimus_cc_ext scripts/study/noting_differences.py FOLDER POINTS SPIKE <Megatron's flags>

At each iteration of POINTS, each rank appends to FOLDER/rank-R.jsonl the bits of all its weights in several codings, by
kind of parameter. SPIKE is ITERATION:RATE:GRADIENT: an iteration, and factors on its learning rate and its gradients.
From the iteration after the last but one of POINTS on, the learning rate is 1e-6, and the weights before and after the
last step are written to FOLDER/rank-R.pt, for the benchmark of deltas.
"""

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.training import training

from optimus_cc_ext.tools import pretrain_gpt
from scripts.study.codings import UNTOUCHED, bits

KINDS = {"vocabulary": r"word_embeddings|output_layer|position_embeddings", "experts": r"\.experts\.", "matrices": ""}
"""Pattern of the names of each kind's matrices; the first that matches counts. All other parameters are vectors."""

LAST_RATE = 1e-6


def kind_of(name: str, parameter: torch.Tensor) -> str:
    """Return the kind of a parameter."""
    if parameter.dim() < 2:
        return "vectors"
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


def note_differences(folder: Path, points: list[int], spike: str) -> None:
    """Measure the steps of the given iterations; after the last but one of them, the learning rate is `LAST_RATE`."""
    step, count = training.train_step, 0
    spiked, of_rate, of_gradient = (int(each) for each in spike.split(":"))

    @functools.wraps(step)
    def noting_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        model, optimizer = args[2], args[3]
        groups = optimizer.param_groups
        named = [(name, each) for chunk in model for name, each in chunk.named_parameters()]
        if len(points) > 1 and count > points[-2]:
            for group in groups:
                group["lr"] = LAST_RATE
        if count == spiked:
            for group in groups:
                group["lr"] *= of_rate
            multiply_once(optimizer, [each for _, each in named], of_gradient)
        if count not in points:
            return step(*args, **kwargs)
        rate, before = max(group["lr"] for group in groups), [each.detach().clone() for _, each in named]
        result = step(*args, **kwargs)
        note(folder / f"rank-{torch.distributed.get_rank()}", named, before, {"iteration": count, "rate": rate})
        if count == points[-1] > points[0]:
            torch.save((before, [each.detach().clone() for _, each in named]), f"{folder}/rank-"
                       f"{torch.distributed.get_rank()}.pt")  # fmt: skip
        return result

    training.train_step = noting_step


def multiply_once(optimizer: Any, parameters: list[Any], factor: int) -> None:
    """Multiply the gradients of the optimizer's next step by a factor; 0 leaves its weight decay alone, without the
    moments of earlier gradients.
    """
    step = optimizer.step

    def larger_step() -> Any:
        for each in parameters:
            each.main_grad.mul_(factor)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]) if factor == 0 else ():
            for state in part.optimizer.state.values():
                state["exp_avg"].zero_()
        optimizer.step = step
        return step()

    optimizer.step = larger_step


def note(path: Path, named: list[tuple[str, Any]], before: list[torch.Tensor], about: dict[str, Any]) -> None:
    """Append a line for each kind of parameters of this rank."""
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for (name, after), old in zip(named, before, strict=True):
        new, kind = after.detach(), kind_of(name, after)
        pairs.setdefault(kind, []).append((old.flatten(), new.flatten()))
        if "word_embeddings" in name and not (touched := after.main_grad.any(1)).all():
            pairs.setdefault(UNTOUCHED, []).append((old[~touched].flatten(), new[~touched].flatten()))
    with path.with_suffix(".jsonl").open("a", encoding="utf-8") as stream:
        for kind, tensors in pairs.items():
            old, new = (torch.cat(side) for side in zip(*tensors, strict=True))
            stream.write(json.dumps(about | {"kind": kind, "values": len(old), **bits(old, new)}) + "\n")


if __name__ == "__main__":
    note_differences(Path(sys.argv.pop(1)), [int(each) for each in sys.argv.pop(1).split(",")], sys.argv.pop(1))
    pretrain_gpt.main()
