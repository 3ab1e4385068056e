"""What goes wrong by a user's hand or by another version of Megatron: each error says what, why and what to do."""

import os
import sys
import time
from typing import NoReturn

__all__ = ["FlagError", "OptimusError", "RanksDisagree", "UnsupportedMegatron", "exit_with", "is_first_local_rank"]


class OptimusError(RuntimeError):
    """Base of every error that this package raises on purpose."""


class FlagError(OptimusError, ValueError):
    """A flag that cannot work. The message names the flag, the reason and the cure."""

    def __init__(self, flag: str, reason: str, cure: str) -> None:
        super().__init__(f"{flag}: {reason}. {cure}.")
        self.flag, self.reason, self.cure = flag, reason, cure


class UnsupportedMegatron(OptimusError):
    """A Megatron whose version is not known, or whose seams are not where they were."""


class RanksDisagree(OptimusError):
    """Two ranks hold different ideas of what is sent. The message names both."""


def is_first_local_rank() -> bool:
    """Whether this process speaks for its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def exit_with(error: OptimusError) -> NoReturn:
    """Say what is wrong, once per node, and end with status 2."""
    if is_first_local_rank():
        print(f"optimus-cc: error: {error}", file=sys.stderr, flush=True)
    else:
        # The launcher ends all ranks as soon as one has ended; let it be the one that speaks.
        time.sleep(5)
    raise SystemExit(2) from error
