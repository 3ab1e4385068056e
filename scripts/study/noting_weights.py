"""Training of the package's own entry point that notes each iteration's loss and, at some, a digest of all weights.

torchrun ... -m optimus_cc_ext scripts/study/noting_weights.py FOLDER INTERVAL <Megatron's flags>

Each rank appends to FOLDER/rank-R.steps a line for each iteration: its number, the loss on the last stage, in all its
digits, and at multiples of INTERVAL the SHA-256 of its weights as they are after the step.
"""

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.training import training

from optimus_cc_ext.tools import pretrain_gpt


def digest(model: list[torch.nn.Module]) -> str:
    """Return the SHA-256 of the weights of this rank's chunks of the model."""
    sha = hashlib.sha256()
    for parameter in (each for chunk in model for each in chunk.parameters()):
        sha.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def note_steps(folder: Path, interval: int) -> None:
    """Append a line to the rank's file after each training step."""
    step, count = training.train_step, 0

    @functools.wraps(step)
    def noting_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        result = step(*args, **kwargs)
        count += 1
        loss = repr(float(result[0]["lm loss"])) if "lm loss" in result[0] else "-"
        weights = digest(args[2]) if count % interval == 0 else "-"
        with (folder / f"rank-{torch.distributed.get_rank()}.steps").open("a", encoding="utf-8") as stream:
            stream.write(f"{count} {loss} {weights}\n")
        return result

    training.train_step = noting_step


if __name__ == "__main__":
    note_steps(Path(sys.argv.pop(1)), int(sys.argv.pop(1)))
    pretrain_gpt.main()
