"""What goes wrong by a user's hand or by another version of Megatron, and how a process then ends.

Each error says what, why and what to do; no traceback where there is nothing to debug.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

__all__ = [
    "OLDEST_TORCH",
    "FlagError",
    "MissingExtra",
    "OptimusError",
    "RanksDisagree",
    "UnknownName",
    "UnsupportedMegatron",
    "exit_with",
    "is_first_local_rank",
    "require_extra",
    "require_megatron",
    "require_torch",
    "run_command",
]

OLDEST_TORCH = (2, 9)
"""The first release of torch with `torch.backends.cuda.matmul.fp32_precision`, which compressors/precision.py sets."""


class OptimusError(RuntimeError):
    """Base of every error that this package raises on purpose."""


class FlagError(OptimusError, ValueError):
    """A flag that cannot work. The message names the flag, the reason and the cure."""

    def __init__(self, flag: str, reason: str, cure: str) -> None:
        super().__init__(f"{flag}: {reason}. {cure}.")
        self.flag, self.reason, self.cure = flag, reason, cure


class UnknownName(OptimusError, ValueError):
    """A name that no table has. The message lists the names that the table has."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        super().__init__(f"{name!r} is not the name of a {kind}; known are {', '.join(known)}")


class MissingExtra(OptimusError, ImportError):
    """Packages that only some users need, and this one has not. The message says how to install them."""


class UnsupportedMegatron(OptimusError):
    """A Megatron whose version is not known, or whose seams are not where they were."""


class RanksDisagree(OptimusError):
    """Two ranks hold different ideas of what is sent. The message names both."""


def require_extra(extra: str, *modules: str) -> None:
    """Raise MissingExtra unless all `modules`, which the extra of this name installs, are there."""
    if missing := [module for module in modules if find_spec(module) is None]:
        raise MissingExtra(
            f"not installed: {', '.join(missing)}. Install what this needs: pip install 'optimus_cc_ext[{extra}]'"
        )


def require_torch() -> None:
    """Raise OptimusError where torch is missing, or older than `OLDEST_TORCH`.

    pip refuses an older one, but containers that bring their own torch are installed into with --no-deps.
    """
    oldest = ".".join(map(str, OLDEST_TORCH))
    if find_spec("torch") is None:
        raise OptimusError("PyTorch is not installed here. Install torch, or run in the environment that trains")
    version: str = importlib.import_module("torch").__version__
    # Only the release counts: NGC's images name theirs 2.9.0a0+COMMIT, which pip would call older than 2.9.
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        raise OptimusError(
            f"torch {version} is too old: Optimus-CC needs torch {oldest} or newer. "
            f"Install torch>={oldest}, or take a container that brings it"
        )


def require_megatron() -> None:
    """Raise UnsupportedMegatron where there is no megatron.core, without importing it yet."""
    try:
        found = find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UnsupportedMegatron(
            "no Megatron can be imported here. Install megatron-core, or put a Megatron-LM checkout on PYTHONPATH: "
            "PYTHONPATH=PATH/TO/Megatron-LM"
        )


def is_first_local_rank() -> bool:
    """Whether this process speaks for its node."""
    # Ranks that share a GPU, on one machine, have its number in LOCAL_RANK.
    shared = os.environ.get("OPTIMUS_CC_DEVICE") == "shared-gpu"
    return os.environ.get("RANK" if shared else "LOCAL_RANK", "0") == "0"


def exit_with(reason: Exception | str) -> NoReturn:
    """End this rank with status 2 and say why: the first one of a node at once, others where that one goes on."""
    if not is_first_local_rank():
        # The launcher ends all ranks as soon as one has ended: who is still here afterwards is the only one to know.
        time.sleep(5)
    print(f"optimus-cc: error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2) from (reason if isinstance(reason, Exception) else None)


def run_command(command: Callable[[], int | None], kept: str = "nothing was kept") -> int:
    """Run a command of ours; return the exit code: its own, 1 (the system refused), 2 (bad input), 130 (Ctrl-C).

    `kept`: what an end before its time leaves, for the line that says so.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        return command() or 0
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {kept}", file=sys.stderr)
        return 130


def _end(signum: int, _frame: FrameType | None) -> None:
    # As an exception, so that what was half made is removed on the way out.
    raise SystemExit(128 + signum)
