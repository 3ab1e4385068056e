"""How a command of ours ends: one line for what is wrong, an exit code for whose fault it was, nothing half made."""

import signal
import sys
from collections.abc import Callable
from types import FrameType

from optimus_cc_ext.errors import OptimusError

__all__ = ["run_command"]


def run_command(command: Callable[[], None]) -> int:
    """Run it; return the exit code: 0, 1 (the system refused), 2 (bad input), 130 (Ctrl-C)."""
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
