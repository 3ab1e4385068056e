"""`torchrun ... -m optimus_cc_ext [pretrain_gpt.py] <Megatron's flags> <ours>`: nothing is patched on disk.

Without a script it runs the package's own `pretrain_gpt` entry.
"""

import os
import runpy
import sys
from pathlib import Path

from optimus_cc_ext import cpu_runtime, install
from optimus_cc_ext.errors import OptimusError

__all__ = ["main"]


def main(argv: list[str]) -> None:
    """Run a Megatron training script, or our own entry, with Optimus-CC installed.

    Args:
        argv: the command line without the program's name: a script first, or flags only.
    """
    first = os.environ.get("RANK", "0") == "0"
    script = argv[0] if argv and not argv[0].startswith("-") else None
    try:
        if script is not None and not Path(script).is_file():
            raise OptimusError(f"{script}: no such script. Give the path of pretrain_gpt.py, or no script at all")
        if script is not None:
            # As python does for a script: its folder comes first, so that its neighbours can be imported.
            sys.path.insert(0, str(Path(script).resolve().parent))
        line = cpu_runtime.activate()
        install()
    except (OptimusError, ValueError, RuntimeError) as error:
        if first:
            print(f"optimus-cc: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
    if first:
        print(line, flush=True)
        print(_which_megatron(), flush=True)
    if script is not None:
        sys.argv = argv
        runpy.run_path(script, run_name="__main__")
        return
    from optimus_cc_ext import pretrain_gpt

    sys.argv = [pretrain_gpt.__file__, *argv]
    pretrain_gpt.main()


def _which_megatron() -> str:
    """megatron is a namespace package: its core and its training part can come from different places."""
    import megatron.core
    import megatron.training

    core, training = (Path(module.__file__ or "").parent.parent for module in (megatron.core, megatron.training))
    if core == training:
        return f"optimus-cc: Megatron from {core}"
    return f"optimus-cc: megatron.core from {core}, megatron.training from {training}"


if __name__ == "__main__":
    main(sys.argv[1:])
