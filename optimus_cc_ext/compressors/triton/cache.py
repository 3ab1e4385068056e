"""The folder in which Triton keeps compiled kernels: on the node, for this user alone, and one rank compiles first.

Triton's default is the home folder. Where nodes share it, thousands of ranks would write the same files at once.
"""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TRITON_CACHE_DIR"
"""The environment variable with Triton's folder, which Triton reads at each compilation. A user's own value is kept."""

NODE_VARIABLE = "NODE_CACHE"
"""The environment variable that names a folder of the node, /tmp by default; scripts/slurm/on_node.sh has the same rule
for the kernels that Inductor compiles."""


def choose(environment: MutableMapping[str, str] = os.environ) -> Path:
    """Return Triton's folder; if the user has set none, set it to a folder that outlives this run.

    Raises:
        OSError: the folder cannot be written, or is not safe from other users; the message names variable and cure.
    """
    if given := environment.get(VARIABLE):
        folder = Path(given)
        _make(folder, VARIABLE)
        return folder
    own = Path(environment.get(NODE_VARIABLE) or "/tmp", f"optimus-cc-{os.getuid()}")
    _make(own, NODE_VARIABLE)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{NODE_VARIABLE}: others can write to {own}. {_CURE.format(NODE_VARIABLE)}")
    folder = own / "triton"
    _make(folder, NODE_VARIABLE)
    environment[VARIABLE] = str(folder)
    return folder


_CURE = "Set {} to a folder on the node in which you may write"


def _make(folder: Path, variable: str) -> None:
    try:
        folder.mkdir(mode=0o700, parents=variable == VARIABLE, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"{variable}: {folder} cannot be written ({error.strerror}). {_CURE.format(variable)}"
        raise OSError(reason) from error


@contextmanager
def one_rank_first(folder: Path) -> Iterator[None]:
    """Let one of the processes that use the folder compile; the other processes wait, and then find its kernels."""
    with (folder / "one_rank_first.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:
            pass  # the file system has no locks: all processes compile at once
        yield


def twice(attempt: Callable[[], str | None], environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Call `attempt`, and once more with a fresh folder if it fails; return the last failure's reason, None after
    success.

    One file that is damaged, or was written by two ranks at once, must not cost a whole run Triton's kernels.
    """
    try:
        folder = choose(environment)
        with one_rank_first(folder):
            if attempt() is None:
                return None
        environment[VARIABLE] = fresh = tempfile.mkdtemp(prefix="fresh-", dir=folder)
    except OSError as error:
        return str(error)
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    return attempt()
