"""What has to happen in a process before Megatron is imported, for the launcher and for a patched pretrain_gpt.py."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from optimus_cc_ext import cpu_runtime, install
from optimus_cc_ext.errors import OptimusError

__all__ = ["prepare", "refuse"]


def prepare() -> None:
    """Choose the device, let Megatron's command line know our flags, and say so once.

    The first lines under `if __name__ == "__main__"`: what imports Megatron's functions by name comes later.
    Where this machine or this Megatron cannot work, the process ends with status 2 and the reason.
    """
    try:
        line = cpu_runtime.activate()
        install()
    except (OptimusError, ValueError, RuntimeError) as error:
        refuse(error)
    if _speaks():
        print(line, flush=True)
        print(_which_megatron(), flush=True)


def refuse(reason: Exception | str) -> NoReturn:
    """End with status 2; the first rank says why."""
    if _speaks():
        print(f"optimus-cc: error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _which_megatron() -> str:
    """megatron is a namespace package: its core and its training part can come from different places."""
    import megatron.core
    import megatron.training

    core, training = (Path(module.__file__ or "").parent.parent for module in (megatron.core, megatron.training))
    if core == training:
        return f"optimus-cc: Megatron from {core}"
    return f"optimus-cc: megatron.core from {core}, megatron.training from {training}"
