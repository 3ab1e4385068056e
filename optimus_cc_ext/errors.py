"""Errors that a user or another version of Megatron causes, and the way in which a process ends after one.

The message of each error names the fault, the reason and the cure. No traceback is printed where there is nothing to
debug.
"""

import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

__all__ = [
    "OLDEST_TORCH",
    "FlagError",
    "MissingExtra",
    "OptimusError",
    "RanksDisagree",
    "UnfitState",
    "UnknownName",
    "UnsupportedMegatron",
    "ends_the_run",
    "exit_with",
    "is_first_local_rank",
    "is_first_rank",
    "named_fields",
    "require_extra",
    "require_megatron",
    "require_torch",
    "run_command",
]

OLDEST_TORCH = (2, 9)
"""The first release of torch that has `torch.backends.cuda.matmul.fp32_precision`, which
compressors/numerics.py sets.
"""


class OptimusError(RuntimeError):
    """Base class of every error that this package raises on purpose."""


class FlagError(OptimusError, ValueError):
    """A flag that cannot work; the message names the flag, the reason and the cure."""

    def __init__(self, flag: str, reason: str, cure: str) -> None:
        super().__init__(f"{flag}: {reason}. {cure}.")
        self.flag, self.reason, self.cure = flag, reason, cure

    def naming_fields(self) -> "FlagError":
        """Return this error for a Python program, whose message names fields and keyword arguments."""
        error = FlagError(self.flag, self.reason, self.cure)
        error.args = (named_fields(str(self)),)
        return error


def named_fields(text: str) -> str:
    """Return a text about flags with the names of fields and keyword arguments in their place."""
    text = re.sub(r"--optimus-cc\b( paper| balanced)?", r"the preset\1", text)
    return re.sub(r"--([a-z0-9]+(?:-[a-z0-9]+)*)", lambda flag: flag[1].replace("-", "_"), text)


class UnknownName(OptimusError, ValueError):
    """A name that is missing from a table; the message lists the names that the table has."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        super().__init__(f"{name!r} is not the name of a {kind}; known are {', '.join(known)}")


class UnfitState(OptimusError, ValueError):
    """A saved compression state that does not fit this rank of this run; the message names the difference."""


class MissingExtra(OptimusError, ImportError):
    """A missing optional dependency; the message says how to install it."""


class UnsupportedMegatron(OptimusError):
    """A Megatron of an unknown version, or one in which a function that we wrap has moved or changed its parameters."""


class RanksDisagree(OptimusError):
    """Two ranks disagree about the messages that they exchange; the message names both ranks."""


def require_extra(extra: str, *modules: str) -> None:
    """Raise MissingExtra unless all `modules`, which the extra of this name installs, can be imported."""
    if missing := [module for module in modules if find_spec(module) is None]:
        raise MissingExtra(
            f"not installed: {', '.join(missing)}. Install the extra that provides it: "
            f"pip install 'optimus_cc_ext[{extra}]'"
        )


def require_torch() -> None:
    """Raise OptimusError if torch is missing, or older than `OLDEST_TORCH`.

    pip refuses an older torch, but `pip install --no-deps`, as used in containers that bring their own torch, does not
    check.
    """
    oldest = ".".join(map(str, OLDEST_TORCH))
    if find_spec("torch") is None:
        raise OptimusError("PyTorch is not installed here. Install torch, or use the environment of your training")
    version: str = importlib.import_module("torch").__version__
    # Compare the release only: NGC's images have versions such as 2.9.0a0+COMMIT, which pip orders before 2.9.
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        raise OptimusError(
            f"torch {version} is too old: Optimus-CC needs torch {oldest} or newer. "
            f"Install torch>={oldest}, or use a container that has it"
        )


def require_megatron() -> None:
    """Raise UnsupportedMegatron if megatron.core cannot be found; it is not imported yet."""
    try:
        found = find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UnsupportedMegatron(
            "megatron.core cannot be imported here. Install megatron-core, or put a Megatron-LM checkout on "
            "PYTHONPATH: "
            "PYTHONPATH=PATH/TO/Megatron-LM"
        )


def is_first_rank() -> bool:
    """Return True if this process prints the notes of the run, before torch.distributed is there."""
    return os.environ.get("RANK", "0") == "0"


def is_first_local_rank() -> bool:
    """Return True if this process is the first of its node to print an error."""
    # Ranks that share one GPU all have that GPU's number in LOCAL_RANK, so RANK tells them apart.
    shared = os.environ.get("OPTIMUS_CC_DEVICE") == "shared-gpu"
    return os.environ.get("RANK" if shared else "LOCAL_RANK", "0") == "0"


def exit_with(reason: Exception | str) -> NoReturn:
    """Print the reason and end this rank with status 2. The first rank of a node does so at once, the others after 5
    seconds.
    """
    if not is_first_local_rank():
        # The launcher ends all ranks as soon as one has ended. A rank that still runs after 5 s may be the only one
        # that knows the reason.
        time.sleep(5)
    print(f"optimus-cc: error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2) from (reason if isinstance(reason, Exception) else None)


@contextmanager
def ends_the_run() -> Iterator[None]:
    """End this rank with a message and without a traceback if the `with` block raises OptimusError."""
    try:
        yield
    except OptimusError as error:
        exit_with(error)


def run_command(command: Callable[[], int | None], kept: str = "nothing was kept") -> int:
    """Run one of our commands, and return the exit status.

    The status is the command's own, or 1 after an OSError, 2 after bad input, 130 after Ctrl-C, and 141 if the program
    that reads the output has ended.

    `kept` is the text that is printed after Ctrl-C; it says which partial results were kept.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Python flushes once more when it exits, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {kept}", file=sys.stderr)
        return 130


def _end(signum: int, _frame: FrameType | None) -> None:
    # Exit through an exception, so that `finally` blocks remove unfinished files.
    raise SystemExit(128 + signum)
