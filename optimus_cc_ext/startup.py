"""Preparation of a process before Megatron is imported, for the launcher and for patched scripts."""

import importlib
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType

from optimus_cc_ext.errors import OptimusError, ends_the_run, exit_with, require_megatron, require_torch

OWN_ENTRY = "optimus_cc_ext.tools.pretrain_gpt"
"""The entry point for users without a script of their own. Training on GPUs with a script needs nothing of tools/."""

DEVICES = "optimus_cc_ext.tools.cpu.cpu_runtime"
"""Chooses the device. Where it is deleted, ranks train on GPUs of their own."""


def launch(argv: list[str]) -> None:
    """Run a Megatron training script, or our own entry point, whose parser knows our flags.

    Args:
        argv: the command line without the program's name: the path of a script and its flags, or flags only.
    """
    script = argv[0] if argv and not argv[0].startswith("-") else None
    if script is None:
        prepare()
        _run_own_entry(argv)
        return
    if not Path(script).is_file():
        exit_with(f"{script}: no such script. Give the path of pretrain_gpt.py, or no script at all")
    # Python puts a script's folder first in sys.path, so that the script can import its neighbours. So do we.
    sys.path.insert(0, str(Path(script).resolve().parent))
    prepare()
    sys.argv = argv
    try:
        runpy.run_path(script, run_name="__main__")
    except ImportError:
        # The script's other modules may not fit the Megatron that is imported.
        from optimus_cc_ext.hooks.registry import check_one_megatron

        with ends_the_run():
            check_one_megatron()
        raise


def prepare_script() -> None:
    """Prepare a script from the block that `optimus-cc patch` has put into it, unless this process is prepared.

    If Megatron is imported already, functions may have been imported by name before they are wrapped. Then the process
    ends with status 2 and a message that names who imported it.
    """
    if _is_prepared():
        return  # The launcher has started the script, or another patched script.
    if "megatron.core" in sys.modules:
        exit_with(
            f"megatron.core was imported ahead of Optimus-CC's block, by {_importer_of_megatron()}. Patch anew "
            f"(optimus-cc patch {sys.argv[0]} --undo, then without --undo), or move the block, with both marker lines, "
            "above that import. If it replaces functions of Megatron, call optimus_cc_ext.startup.prepare() after it, "
            "instead of the block"
        )
    prepare()


def prepare() -> None:
    """Choose the device, and let Megatron's parser know our flags; print the device and Megatron's path.

    Call it first under `if __name__ == "__main__"`, before modules that import Megatron's functions by name. If this
    machine or this Megatron cannot be used, the process ends with status 2 and a message that names the reason, the
    rank and the host. A process that fails later does not wait for its data loaders.
    """
    # Priority 0 runs when Python ends, before multiprocessing waits for its children.
    multiprocessing.util.Finalize(None, _kill_daemons, exitpriority=0)
    try:
        require_torch()
        require_megatron()
        line = _choose_device()
        from optimus_cc_ext.hooks import start

        start()
    except (OptimusError, ValueError, RuntimeError) as error:
        exit_with(f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}: {error}")
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)
        print(_which_megatron(), flush=True)


def _choose_device() -> str:
    if _is_there(DEVICES):
        line: str = importlib.import_module(DEVICES).activate()
        return line
    import torch

    if not torch.cuda.is_available():
        raise OptimusError(
            f"PyTorch sees no CUDA device, and {DEVICES}, which runs Megatron on a CPU, is not installed"
        )
    return f"optimus-cc: running on CUDA ({torch.cuda.device_count()} devices visible)"


def _kill_daemons() -> None:
    """Kill the children that multiprocessing would end by SIGTERM, and then wait for.

    With Megatron's --exit-signal-handler the workers of a data loader only note that signal: a rank that failed would
    wait for ever, and torchrun would never learn that it failed.
    """
    # Torch's handler would report the death of a data loader's worker as one more error, after the real one.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _is_prepared() -> bool:
    hooks = sys.modules.get("optimus_cc_ext.hooks")
    return hooks is not None and hooks.launched() is not None


def _run_own_entry(argv: list[str]) -> None:
    script = "Give the script of a Megatron-LM checkout: python -m optimus_cc_ext PATH/TO/pretrain_gpt.py ..."
    if not _is_there(OWN_ENTRY):
        exit_with(f"the built-in pretrain_gpt is not installed. {script}")
    try:
        own_entry = importlib.import_module(OWN_ENTRY)
    except ImportError as error:
        from optimus_cc_ext.hooks.registry import megatron_version

        exit_with(f"the built-in pretrain_gpt cannot run on megatron-core {megatron_version()} ({error}). {script}")
    sys.argv = [str(own_entry.__file__), *argv]
    own_entry.main()


def _is_there(module: str) -> bool:
    """Return True if a module of tools/, which can be deleted, is there."""
    names = module.split(".")
    return all(find_spec(".".join(names[:count])) is not None for count in range(1, len(names) + 1))


def _importer_of_megatron() -> str:
    """Return the first module that holds something of Megatron, and its file."""
    modules = {name: module for name, module in sys.modules.items() if isinstance(module, ModuleType)}
    for name, module in modules.items():
        held = [each for each in vars(module).values() if isinstance(each, ModuleType | FunctionType | type)]
        homes = {str(each.__name__ if isinstance(each, ModuleType) else each.__module__) for each in held}
        if not name.startswith("megatron") and any(home.partition(".")[0] == "megatron" for home in homes):
            return f"{name} ({getattr(module, '__file__', None)})"
    return "a module that holds nothing of it"


def _which_megatron() -> str:
    """Return the log line with the folder of Megatron.

    megatron is a namespace package: megatron.core and megatron.training can lie in different folders.
    """
    import megatron.core
    import megatron.training

    core, training = (Path(module.__file__ or "").parent.parent for module in (megatron.core, megatron.training))
    if core == training:
        return f"optimus-cc: Megatron from {core}"
    return f"optimus-cc: megatron.core from {core}, megatron.training from {training}"
