"""What happens in a process before Megatron is imported: for the launcher, and for a patched pretrain_gpt.py."""

import os
import runpy
import socket
import sys
from pathlib import Path

from optimus_cc_ext.api import install
from optimus_cc_ext.devices import cpu_runtime, parent_death
from optimus_cc_ext.errors import OptimusError, exit_with, require_megatron, require_torch

__all__ = ["launch", "prepare"]


def launch(argv: list[str]) -> None:
    """Run a Megatron training script, or our own entry, with Optimus-CC installed.

    Args:
        argv: the command line without the program's name: a script first, or flags only.
    """
    script = argv[0] if argv and not argv[0].startswith("-") else None
    if script is None:
        prepare()
        _run_own_entry(argv)
        return
    if not Path(script).is_file():
        exit_with(f"{script}: no such script. Give the path of pretrain_gpt.py, or no script at all")
    # As python does for a script: its folder comes first, so that its neighbours can be imported.
    sys.path.insert(0, str(Path(script).resolve().parent))
    prepare()
    sys.argv = argv
    runpy.run_path(script, run_name="__main__")


def prepare() -> None:
    """Choose the device, let Megatron's command line know our flags, and say so once; children end with the process.

    The first lines under `if __name__ == "__main__"`: what imports Megatron's functions by name comes later.
    Where this machine or this Megatron cannot work, the process ends with status 2, the reason, and where it is.
    """
    parent_death.install()
    try:
        require_torch()
        require_megatron()
        line = cpu_runtime.activate()
        install()
    except (OptimusError, ValueError, RuntimeError) as error:
        exit_with(f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}: {error}")
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)
        print(_which_megatron(), flush=True)


def _run_own_entry(argv: list[str]) -> None:
    try:
        import optimus_cc_ext.pretrain_gpt as own_entry
    except ImportError as error:
        from optimus_cc_ext.hooks.registry import megatron_version

        exit_with(
            f"the built-in pretrain_gpt cannot run on megatron-core {megatron_version()} ({error}). "
            "Give the script of a Megatron-LM checkout: python -m optimus_cc_ext PATH/TO/pretrain_gpt.py ..."
        )
    sys.argv = [own_entry.__file__, *argv]
    own_entry.main()


def _which_megatron() -> str:
    """megatron is a namespace package: its core and its training part can come from different places."""
    import megatron.core
    import megatron.training

    core, training = (Path(module.__file__ or "").parent.parent for module in (megatron.core, megatron.training))
    if core == training:
        return f"optimus-cc: Megatron from {core}"
    return f"optimus-cc: megatron.core from {core}, megatron.training from {training}"
