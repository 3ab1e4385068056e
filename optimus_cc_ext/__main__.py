"""`torchrun ... -m optimus_cc_ext [pretrain_gpt.py] <Megatron's flags> <ours>`: nothing is patched on disk.

Without a script it runs the package's own `pretrain_gpt` entry.
"""

import runpy
import sys
from pathlib import Path

from optimus_cc_ext import startup

__all__ = ["main"]


def main(argv: list[str]) -> None:
    """Run a Megatron training script, or our own entry, with Optimus-CC installed.

    Args:
        argv: the command line without the program's name: a script first, or flags only.
    """
    script = argv[0] if argv and not argv[0].startswith("-") else None
    if script is not None:
        if not Path(script).is_file():
            startup.refuse(f"{script}: no such script. Give the path of pretrain_gpt.py, or no script at all")
        # As python does for a script: its folder comes first, so that its neighbours can be imported.
        sys.path.insert(0, str(Path(script).resolve().parent))
    startup.prepare()
    if script is not None:
        sys.argv = argv
        runpy.run_path(script, run_name="__main__")
    else:
        _run_own_entry(argv)


def _run_own_entry(argv: list[str]) -> None:
    try:
        from optimus_cc_ext import pretrain_gpt
    except ImportError as error:
        from optimus_cc_ext.hooks.registry import megatron_version

        startup.refuse(
            f"the built-in pretrain_gpt cannot run on megatron-core {megatron_version()} ({error}). "
            "Give the script of a Megatron-LM checkout: python -m optimus_cc_ext PATH/TO/pretrain_gpt.py ..."
        )
    sys.argv = [pretrain_gpt.__file__, *argv]
    pretrain_gpt.main()


if __name__ == "__main__":
    main(sys.argv[1:])
