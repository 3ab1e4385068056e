"""What goes wrong by a user's hand or by another version of Megatron, and how a process then ends.

Each error says what, why and what to do; no traceback where there is nothing to debug.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

__all__ = [
    "FlagError",
    "MissingExtra",
    "OptimusError",
    "RanksDisagree",
    "UnsupportedMegatron",
    "exit_with",
    "is_first_local_rank",
    "require_extra",
    "run_command",
]


class OptimusError(RuntimeError):
    """Base of every error that this package raises on purpose."""


class FlagError(OptimusError, ValueError):
    """A flag that cannot work. The message names the flag, the reason and the cure."""

    def __init__(self, flag: str, reason: str, cure: str) -> None:
        super().__init__(f"{flag}: {reason}. {cure}.")
        self.flag, self.reason, self.cure = flag, reason, cure


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


def is_first_local_rank() -> bool:
    """Whether this process speaks for its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def exit_with(reason: Exception | str) -> NoReturn:
    """End this rank with status 2; the first one of a node says why."""
    if is_first_local_rank():
        print(f"optimus-cc: error: {reason}", file=sys.stderr, flush=True)
    else:
        # The launcher ends all ranks as soon as one has ended; let it be the one that speaks.
        time.sleep(5)
    raise SystemExit(2) from (reason if isinstance(reason, Exception) else None)


def run_command(command: Callable[[], None]) -> int:
    """Run a command of ours; return the exit code: 0, 1 (the system refused), 2 (bad input), 130 (Ctrl-C)."""
    signal.signal(signal.SIGTERM, _end)
    try:
        command()
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return 130
    return 0


def _end(signum: int, _frame: FrameType | None) -> None:
    # As an exception, so that what was half made is removed on the way out.
    raise SystemExit(128 + signum)
