"""Launcher in a forked rank that already holds Megatron: the lines that it prints, and the status with which it
ends.
"""

import argparse
import contextlib
import io
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tests.forked_ranks import run_ranks
from tests.megatron_runs import TINY_GPT

__all__ = ["Launch", "call", "launch"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Result of one call of the launcher."""

    code: int | str | None
    """Exit status; None: the command line was accepted, and the call was stopped then."""

    output: str
    """stdout and stderr, in the order in which they were written."""

    probed: Any = None
    """Return value of the test's probe for the accepted arguments."""

    @property
    def accepted(self) -> bool:
        """Return whether validation accepted the command line."""
        return self.code is None

    @property
    def ours(self) -> list[str]:
        """Lines that this package wrote; Megatron prints some hundred of its own."""
        return [line for line in self.output.splitlines() if line.startswith("optimus-cc: ")]


class _Accepted(BaseException):
    """Signal that the command line was accepted; not an Exception, so that no code on its way catches it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.namespace = args


def launch(
    flags: Sequence[str],
    *,
    tiny: bool = True,
    world_size: int = 4,
    rank: int = 0,
    before: Callable[[], Any] | None = None,
    probe: Callable[[argparse.Namespace], Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Call `python -m optimus_cc_ext <flags>` as `rank` of `world_size` ranks that do not exist.

    The call is stopped where Megatron, after validation, would begin to write files and to look for the other ranks.
    `tiny` puts the flags of the tiny GPT first; `before()` runs in the rank before the launcher.
    """
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    place = {**dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), **sizes}
    argv = [*TINY_GPT, *flags] if tiny else list(flags)
    [outcome] = run_ranks(1, _launch, argv, before, probe, timeout=60, env={**place, **(env or {})})
    return outcome


def call(function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None) -> Launch:
    """Call `function(*args)` in a forked rank; return its output, with its result as the exit status."""
    [outcome] = run_ranks(1, _captured, function, args, timeout=60, env=env)
    return outcome


def _launch(
    argv: list[str], before: Callable[[], Any] | None, probe: Callable[[argparse.Namespace], Any] | None
) -> Launch:
    from megatron.training import arguments

    from optimus_cc_ext import startup

    def accept(args: argparse.Namespace) -> NoReturn:
        raise _Accepted(args)

    arguments.set_global_variables = accept
    if before is not None:
        before()
    return _captured(startup.launch, (argv,), probe)


def _captured(
    function: Callable[..., Any], args: Sequence[Any], probe: Callable[[argparse.Namespace], Any] | None = None
) -> Launch:
    output, probed, code = io.StringIO(), None, None
    os.environ["COLUMNS"] = "110"  # argparse breaks its lines at the width of the terminal, which is COLUMNS
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = function(*args)
        except _Accepted as accepted:
            probed = None if probe is None else probe(accepted.namespace)
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
            code = 1
    return Launch(code, output.getvalue(), probed)
