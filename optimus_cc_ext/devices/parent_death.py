"""End a rank's child processes with the rank, `kill -9` included: every child sets Linux's parent-death signal at its
start.

With torch_dist checkpoints a rank owns a server process of Megatron's (a ``multiprocessing.Manager``). Without the
signal this server outlives a killed rank for ever, and keeps the pipe of the rank's output open.

This covers the children of ``multiprocessing``, at any depth and by any start method, and those of ``subprocess``.
Left alone are: commands that ``subprocess.run`` and its like wait for, which end by themselves, because setting the
signal would cost a copy of the rank's page tables (4 GiB: 310 ms instead of 1); multiprocessing's resource tracker,
which cleans up after the dead and then ends by itself; processes started with ``start_new_session=True``, which are
meant to live on; and processes that another thread than the main one starts, because for the kernel a child's parent
is the thread that started it. On other systems than Linux none of this is done.

On all systems, a rank that fails does not wait for its children. When Python ends, multiprocessing sends SIGTERM to its
daemons, such as the workers of a data loader, and waits for their end. With Megatron's --exit-signal-handler the
workers only note the signal: the rank would hang, and torchrun would never learn that the rank failed. So the rank
kills them.
"""

import ctypes
import functools
import inspect
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimus_cc_ext.patching import Patches

__all__ = ["end_with", "install"]

PR_SET_PDEATHSIG = 1  # linux/prctl.h

# libc is loaded here: in a forked child, loading could wait for a lock that a thread of the parent held.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_forking = threading.local()
_popen_signature = inspect.signature(subprocess.Popen.__init__)


@functools.cache
def install() -> None:
    """Make all children of this process, and their children, end when this process ends; never wait for daemons."""
    # Priority 0 runs when Python ends, before multiprocessing waits for its children. A forked child does not inherit
    # this finalizer.
    multiprocessing.util.Finalize(None, _kill_daemons, exitpriority=0)
    if _libc is None:
        return
    os.register_at_fork(before=_remember_forker, after_in_child=_keep_forker)
    multiprocessing.util.register_after_fork(_forking, lambda _: _end_with_forker())
    patches = Patches()  # these patches stay until this process ends
    patches.wrap(multiprocessing.util, "spawnv_passfds", _spawn)
    patches.wrap(subprocess.Popen, "__init__", _start_subprocess)
    for name in ("run", "call"):  # subprocess.check_output and check_call call these two
        patches.wrap(subprocess, name, _run_and_wait)


def end_with(parent: int) -> None:
    """Make this process end when its parent, whose process id is `parent`, ends; at once if the parent has ended
    already.
    """
    if _libc is None:
        return
    _libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_daemons() -> None:
    """Kill the children that multiprocessing is about to end, by a signal that they cannot ignore."""
    # Torch's handler would report the death of a data loader's worker as one more error, after the real one.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _in_main_thread() -> bool:
    return threading.get_native_id() == os.getpid()


def _remember_forker() -> None:
    _forking.process = os.getpid() if _in_main_thread() else None


def _keep_forker() -> None:
    # A child of the fork server runs imports before it reaches `_end_with_forker`, and an imported module may fork,
    # too.
    _forking.parent = _forking.process


def _end_with_forker() -> None:
    if (parent := getattr(_forking, "parent", None)) is not None:
        end_with(parent)


def _spawn(spawn: Callable[..., int], path: str | bytes, args: list[Any], passfds: list[int]) -> int:
    """Spawn a new interpreter, for a spawned child or the fork server, that calls `end_with` before anything else."""
    # An executable that the user has chosen may be a wrapper, which would then be the parent.
    if "-c" in args and os.fsdecode(path) == sys.executable and _in_main_thread():
        program = args.index("-c") + 1
        if "resource_tracker" not in args[program]:
            args = [*args[:program], _first_words() + args[program], *args[program + 1 :]]
    return spawn(path, args, passfds)


def _first_words() -> str:
    # The child must import this very file, so its folder comes first in sys.path. It is removed again, so that it hides
    # no module of Python's.
    return (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
        f"from {__name__} import end_with, install; "
        f"del sys.path[0]; end_with({os.getpid()}); install(); "
    )


def _start_subprocess(start: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    given = _popen_signature.bind(*args, **kwargs)
    waited_for = getattr(_forking, "waits", False)
    if _in_main_thread() and not waited_for and not given.arguments.get("start_new_session"):
        given_function = given.arguments.get("preexec_fn")

        def before_exec() -> None:
            _end_with_forker()
            if given_function is not None:
                given_function()

        given.arguments["preexec_fn"] = before_exec
    start(*given.args, **given.kwargs)


def _run_and_wait(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a command that this process waits for; without `preexec_fn`, Python starts it by vfork."""
    before, _forking.waits = getattr(_forking, "waits", False), True
    try:
        return run(*args, **kwargs)
    finally:
        _forking.waits = before
