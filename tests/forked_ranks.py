"""Run a function on several ranks, each a fork of one process that has already imported torch and Megatron.

    def sum_of_ranks() -> float: ...            # a module-level function, run in every rank
    assert run_ranks(4, sum_of_ranks) == [6.0] * 4

Importing Megatron takes seconds per process, forking milliseconds; the server is started by the first call
and serves the whole test session. Ranks find each other as under torchrun
(``torch.distributed.init_process_group("gloo")``). Each is its own process group, killed with everything it
started when the call ends, whatever the reason; a rank whose test session has disappeared ends by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests import device

__all__ = ["run_ranks"]

PRELOAD = "tests.rank_preload"
REPOSITORY = Path(__file__).resolve().parent.parent
TAIL_CHARACTERS = 4000
STACKS_GRACE_SECONDS = 1.0


@dataclass(slots=True)
class _Rank:
    """Started rank, as the test sees it."""

    number: int
    process: BaseProcess
    answers: Connection
    log: Path
    answer: tuple[str, Any] | None = None
    """Answer of the rank, ("result", value) or ("failure", traceback); None until it has answered."""

    def describe(self) -> str:
        tail = self.log.read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
        return f"----- output of rank {self.number} -----\n{tail or '(nothing)'}"


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 180.0, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Run ``fn(*args)`` in ``world_size`` processes with torchrun's variables set; return the results in rank order.

    ``fn`` must be importable (a module-level function), ``args`` and results picklable; tensors are copied, without
    their gradients. ``timeout`` is in seconds for all ranks together; ``env`` is added to every rank's environment.

    Raises AssertionError when a rank raises, dies or does not answer in time, with the reasons and the output of the
    ranks concerned.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])

    # The rendezvous is in this process, as torchrun's agent hosts it: there is no free port to guess, and no rank on
    # which the others depend.
    store = torch.distributed.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    job = _pickled((fn, args))
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _lifeline(context) as lifeline:
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                variables = {
                    **dict.fromkeys(("RANK", "LOCAL_RANK"), str(number)),
                    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    **(env or {}),
                }
                ranks.append(_start(context, number, job, variables, lifeline, Path(folder)))
            _collect(ranks, deadline, timeout)
        finally:
            for rank in ranks:
                _kill(rank)
    return [rank.answer[1] for rank in ranks if rank.answer is not None]


@contextlib.contextmanager
def _lifeline(context: Any) -> Iterator[Connection]:
    """Return the reading end of a pipe whose writing end only this process holds, so that it closes with the test
    session.
    """
    reader, writer = context.Pipe(duplex=False)
    with reader, writer:
        yield reader


def _start(
    context: Any, number: int, job: bytes, variables: dict[str, str], lifeline: Connection, folder: Path
) -> _Rank:
    import pytest  # pytest is imported here, because each rank imports this module, and does not need it

    answers, answer_to = context.Pipe(duplex=False)
    log = folder / f"rank-{number}.log"
    log.touch()
    process = context.Process(
        target=_rank_main, args=(job, variables, lifeline, answer_to, str(log)), name=f"rank-{number}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # ranks must not import pytest's script
        # The fork server does not inherit this process's sys.path.
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        process.start()
    answer_to.close()
    return _Rank(number=number, process=process, answers=answers, log=log)


def _collect(ranks: list[_Rank], deadline: float, timeout: float) -> None:
    """Wait for every rank's answer; raise AssertionError at the first failure or at the deadline."""
    waiting = {rank.answers: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(_timed_out(ranks, list(waiting.values()), timeout))
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                rank.answer = pickle.loads(connection.recv_bytes())
            except EOFError:
                rank.process.join(timeout=5)
                rank.answer = ("failure", f"it died without an answer (exit code {rank.process.exitcode})")
        failed = [rank for rank in ranks if rank.answer is not None and rank.answer[0] == "failure"]
        if failed:
            reasons = (f"rank {rank.number} failed: {rank.answer[1]}\n{rank.describe()}" for rank in failed)
            raise AssertionError("\n".join(reasons))


def _timed_out(ranks: list[_Rank], unfinished: list[_Rank], timeout: float) -> str:
    """Return the message for a timeout, after asking the unfinished ranks for their stacks."""
    for rank in unfinished:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(STACKS_GRACE_SECONDS)
    numbers = ", ".join(str(rank.number) for rank in unfinished)
    reason = f"after {timeout:g} s these ranks of {len(ranks)} had not finished: {numbers}"
    return "\n".join([reason, *(rank.describe() for rank in unfinished)])


def _kill(rank: _Rank) -> None:
    """Kill a rank and the processes that it started. Ranks that have answered wait for this, so no peer loses them
    early.
    """
    for kill in (os.killpg, os.kill):  # os.kill is for a rank that died before it formed a process group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(rank.process.pid, signal.SIGKILL)
    rank.process.join()
    rank.answers.close()


def _rank_main(job: bytes, variables: dict[str, str], lifeline: Connection, answer_to: Connection, log: str) -> None:
    """Run a rank's function and send its answer; the rank ends by being killed."""
    os.setpgid(0, 0)
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    threading.Thread(target=_end_with_the_session, args=(lifeline,), daemon=True).start()

    # A fork server that this rank starts (Megatron's checkpoint writer does) must be its own child and die with it. If
    # it were inherited, this session's server would start those processes outside of this rank's group.
    forkserver._forkserver._forkserver_address = None  # type: ignore[attr-defined]
    forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]

    os.environ.update(variables)
    try:
        preloaded = PRELOAD in sys.modules
        __import__(PRELOAD)  # this import raises the error that the fork server has swallowed
        assert preloaded, f"the fork server started without {PRELOAD}: every rank imports Megatron by itself"
        torch.set_num_threads(1)
        device.take()
        fn, args = pickle.loads(job)
        message = _pickled(("result", fn(*args)))
    except BaseException:  # SystemExit is a failure, too: the function did not return
        message = _pickled(("failure", traceback.format_exc()))
    answer_to.send_bytes(message)
    threading.Event().wait()


def _end_with_the_session(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os.killpg(0, signal.SIGKILL)


class _Pickler(pickle.Pickler):
    """Pickler that copies tensors by value: PyTorch's way would share memory with a process that is about to be killed,
    or, with Megatron imported in the rank, have the test session import Megatron.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        data = obj.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return _tensor, (data, obj.dtype, tuple(obj.shape))


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
