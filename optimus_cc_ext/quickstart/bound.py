"""`python -m optimus_cc_ext.quickstart.bound MODULE ARGS...`: run MODULE, but never longer than the parent.

torchrun starts its ranks in sessions of their own, where no signal to a process group reaches them. With this in front
of torchrun and of every rank, the whole tree ends with the quickstart even where that is killed with SIGKILL.
"""

import ctypes
import runpy
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Tie this process to its parent, then become `python -m argv[0] argv[1:]`. Linux only.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    module, *sys.argv[1:] = argv
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
