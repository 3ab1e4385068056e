"""Training of the package's own entry point that measures what one step changes in the weights, in last places.

torchrun ... -m optimus_cc_ext scripts/study/noting_differences.py FOLDER POINTS <Megatron's flags>

At each iteration of POINTS, each rank appends to FOLDER/rank-R.jsonl the bits of all its weights in several codings, by
kind of parameter. From the iteration after the last but one of POINTS on, the learning rate is 1e-6, and the weights
before and after the last step are written to FOLDER/rank-R.pt, for the benchmark of deltas.
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
from scripts.study.codings import bits

KINDS = {"vocabulary": r"word_embeddings|output_layer|position_embeddings", "experts": r"\.experts\.", "matrices": ""}
"""Pattern of the names of each kind's matrices; the first that matches counts. All other parameters are vectors."""

LAST_RATE = 1e-6


def kind_of(name: str, parameter: torch.Tensor) -> str:
    """Return the kind of a parameter."""
    if parameter.dim() < 2:
        return "vectors"
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


def note_differences(folder: Path, points: list[int]) -> None:
    """Measure the steps of the given iterations; after the last but one of them, the learning rate is `LAST_RATE`."""
    step, count = training.train_step, 0

    @functools.wraps(step)
    def noting_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        model, optimizer = args[2], args[3]
        groups = optimizer.param_groups
        if len(points) > 1 and count > points[-2]:
            for group in groups:
                group["lr"] = LAST_RATE
        if count not in points:
            return step(*args, **kwargs)
        named = [(name, each) for chunk in model for name, each in chunk.named_parameters()]
        rate, before = max(group["lr"] for group in groups), [each.detach().clone() for _, each in named]
        result = step(*args, **kwargs)
        note(folder / f"rank-{torch.distributed.get_rank()}", named, before, {"iteration": count, "rate": rate})
        if count == points[-1] > points[0]:
            torch.save((before, [each.detach().clone() for _, each in named]), f"{folder}/rank-"
                       f"{torch.distributed.get_rank()}.pt")  # fmt: skip
        return result

    training.train_step = noting_step


def note(path: Path, named: list[tuple[str, Any]], before: list[torch.Tensor], about: dict[str, Any]) -> None:
    """Append a line for each kind of parameters of this rank."""
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for (name, after), old in zip(named, before, strict=True):
        pairs.setdefault(kind_of(name, after), []).append((old.flatten(), after.detach().flatten()))
    with path.with_suffix(".jsonl").open("a", encoding="utf-8") as stream:
        for kind, tensors in pairs.items():
            old, new = (torch.cat(side) for side in zip(*tensors, strict=True))
            stream.write(json.dumps(about | {"kind": kind, "values": len(old), **bits(old, new)}) + "\n")


if __name__ == "__main__":
    note_differences(Path(sys.argv.pop(1)), [int(each) for each in sys.argv.pop(1).split(",")])
    pretrain_gpt.main()
