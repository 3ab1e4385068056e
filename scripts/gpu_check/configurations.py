"""Training script of the check `nccl`: one configuration after the other in the same process, each of which writes its
losses and hashes of all ranks' weights to FOLDER/NAME.json.

torchrun ... -m optimus_cc_ext scripts/gpu_check/configurations.py FOLDER [--tiny]
"""

import functools
import gc
import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, rerun_state_machine
from megatron.training import global_vars, training

from optimus_cc_ext.hooks import launched, start
from optimus_cc_ext.tools import pretrain_gpt
from scripts.gpu_check.nccl import CONFIGURATIONS, WORDS, Configuration

_losses: list[float] = []
_built: list[torch.nn.Module] = []
"""Model chunks of this rank."""


def _watched() -> None:
    """Note the losses of each step and the model, inside of the extension's own wraps."""
    step = training.train_step

    @functools.wraps(step)
    def noting_step(*args: Any, **kwargs: Any) -> Any:
        _built[:] = args[2]
        result = step(*args, **kwargs)
        _losses.extend(float(value) for key, value in result[0].items() if key == "lm loss")
        return result

    training.train_step = noting_step


def _train(name: str, configuration: Configuration, folder: Path, *, tiny: bool) -> None:
    started, iterations = time.monotonic(), 4 if tiny else 60 if configuration.long else 12
    os.environ["OPTIMUS_CC_NODE"] = f"ranks:{configuration.beside}"
    flags = f"{{all}} {WORDS['tiny' if tiny else 'large']} {configuration.flags} {configuration.ours or ''}"
    words = flags.format(**WORDS, folder=folder, half=iterations // 2).split()
    sys.argv = ["pretrain_gpt.py", *words, "--train-iters", str(iterations)]
    if configuration.ours is not None:
        start()
    pretrain_gpt.main()
    digest = hashlib.sha256()
    for parameter in (each for chunk in _built for each in chunk.parameters()):
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    if "--save" in words and torch.distributed.get_rank() == 0:
        # Megatron loads the step that this file names, not --ckpt-step's, into a distributed optimizer.
        (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text(f"{iterations // 2}")
    weights: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(weights, digest.hexdigest())
    if torch.distributed.get_rank() == len(weights) - 1:  # the rank that has losses
        found = {"losses": _losses, "weights": weights, "seconds": time.monotonic() - started}
        (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
        print(f"configuration done: {name}", flush=True)
    _forget()


def _remove() -> None:
    if (launch := launched()) is not None:
        launch.remove()


def _forget() -> None:
    """Take Megatron's state and the extension out of the process again; the process group stays."""
    _remove()
    _built.clear()
    _losses.clear()
    global_vars.unset_global_variables()
    rerun_state_machine.destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    if torch.distributed.get_backend() == "gloo":  # whose threads, hundreds after some trainings, take turns for ever
        everyone = torch.distributed.group.WORLD
        for group in [each for each in torch.distributed.distributed_c10d._world.pg_map if each is not everyone]:
            torch.distributed.destroy_process_group(group)
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    target, is_tiny = Path(sys.argv[1]), "--tiny" in sys.argv
    _remove()  # the launcher has started it
    _watched()
    # Groups stay until the process ends, and NCCL opens tens of sockets for each.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for title, each in CONFIGURATIONS.items():
        _train(title, each, target, tiny=is_tiny)
