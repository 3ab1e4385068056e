"""On a CPU every contender of the compressors' benchmark has a process of its own, as in a training, which has one.

In one process they would share the allocator: what one has freed spares the other the page faults of its temporaries,
or costs it some. And each would find the caches full of the other's tensors. In turn, again and again, one process
works while the others wait. The beginning of a turn does not count: a processor that was idle takes a while to run at
its full speed, as it does in a training, and to fill its caches.
"""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from compressors_timing import Sample, Work, have_cores_of_their_own, in_turn, seconds_of

__all__ = ["Contender", "alternate"]

Contender = Callable[[], Mapping[str, Work]]
"""Makes its tensors, in the process that calls it, and checks what it is going to do. Must be picklable."""

_IMPORTED_ONCE = ["torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "matplotlib.figure"]
"""What takes long to import; the server finds installed packages only, not the modules beside this one."""

_SECONDS_TO_BE_READY, _SECONDS_FOR_A_TURN = 300.0, 600.0
_SECONDS_BETWEEN_ATTEMPTS = 0.2
_EVICTING_VALUES = 1 << 25
"""128 MB of fp32: several times the last-level cache of one socket's share."""


def alternate(
    contenders: Mapping[str, Contender],
    device: torch.device,
    rounds: int,
    *,
    in_a_row: int = 3,
    warm_up: float = 0.2,
    cold: bool = False,
    processes: int = 1,
    attempts: int = 8,
) -> dict[str, Sample]:
    """Time every piece of work of all contenders; its name is the contender's, and its own after a comma if it has one.

    Args:
        rounds: how often each contender has its turn in a process. A first round does not count.
        in_a_row: repetitions of a piece of work in a turn that count. Where there are several, those of its first
            `warm_up` seconds, at least one, do not.
        cold: the caches are filled with something else before every repetition, on a CPU.
        processes: how many each contender has, one after the other, on a CPU: where its memory lies, and whether the
            allocator keeps it, is settled when a process begins. The times of all of them make one sample.
        attempts: at a turn in which no threads share a core, on a CPU.

    Raises:
        SystemExit: a contender's check failed, or its process did not answer in time.
    """
    if device.type == "cuda":
        works = {_joined(name, what): w for name, make in contenders.items() for what, w in make().items()}
        return in_turn(works, device, rounds * in_a_row)
    turns: dict[str, list[_Turn]] = {}
    for _ in range(processes):
        for name, taken in _one_life(contenders, rounds, _How(in_a_row, warm_up, cold, attempts)).items():
            turns.setdefault(name, []).extend(taken)
    return {
        name: Sample.of(
            [second for turn in taken for second in turn.seconds],
            crowded=sum(len(turn.seconds) for turn in taken if turn.crowded),
        )
        for name, taken in turns.items()
    }


@dataclass(frozen=True)
class _How:
    """See `alternate`."""

    in_a_row: int
    warm_up: float
    cold: bool
    attempts: int


@dataclass(frozen=True)
class _Turn:
    """Of one piece of work."""

    seconds: list[float]
    crowded: bool


def _one_life(contenders: Mapping[str, Contender], rounds: int, how: _How) -> dict[str, list[_Turn]]:
    """All turns of one process for each contender."""
    # Started by a server that has imported torch but never used its threads: a child of this process, which has used
    # them, would wait for threads that it does not have.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    workers: dict[str, tuple[Any, Connection]] = {}
    turns: dict[str, list[_Turn]] = {}
    try:
        for name, make in contenders.items():
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, make, torch.get_num_threads(), how), daemon=True)
            process.start()
            there.close()
            workers[name] = process, here
            _answer(name, here, _SECONDS_TO_BE_READY)
        for turn in range(rounds + 1):
            for name, (_, connection) in workers.items():
                for what, taken in _answer(name, connection, _SECONDS_FOR_A_TURN, asked=True).items():
                    if turn > 0:
                        turns.setdefault(_joined(name, what), []).append(taken)
    finally:
        for process, connection in workers.values():
            connection.close()
            process.kill()
            process.join()
    return turns


def _joined(name: str, what: str) -> str:
    return f"{name}, {what}" if what else name


def _answer(name: str, connection: Connection, limit: float, *, asked: bool = False) -> dict[str, _Turn]:
    """What a contender says, after it was asked for a turn or has got ready."""
    try:
        if asked:
            connection.send(True)
        if not connection.poll(limit):
            raise SystemExit(f"compressors.py: the process of {name!r} did not answer within {limit:g} s")
        answer = connection.recv()
    except (EOFError, OSError):  # also where the kernel ended it between two turns
        raise SystemExit(f"compressors.py: the process of {name!r} ended, see above") from None
    if isinstance(answer, str):
        raise SystemExit(answer)
    return answer


def _serve(connection: Connection, make: Contender, threads: int, how: _How) -> None:
    """The life of a contender's process: a turn for every message."""
    torch.set_num_threads(threads)
    filler = torch.zeros(_EVICTING_VALUES if how.cold else 0)
    try:
        works = make()
    except SystemExit as failed:
        connection.send(str(failed))
        return
    connection.send({})
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        connection.send({what: _turn(work, how, filler) for what, work in works.items()})


def _turn(work: Work, how: _How, filler: torch.Tensor) -> _Turn:
    """The times of a turn in which every thread had a core, if there is one."""
    turn = _attempt(work, how, filler)
    for _ in range(how.attempts - 1):
        if not turn.crowded:
            break
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        turn = _attempt(work, how, filler)
    return turn


def _attempt(work: Work, how: _How, filler: torch.Tensor) -> _Turn:
    had_cores = have_cores_of_their_own()
    warm = time.monotonic() + how.warm_up
    while how.in_a_row > 1:
        work()
        if time.monotonic() > warm:
            break
    seconds = []
    for _ in range(how.in_a_row):
        filler.add_(1.0)
        seconds.append(seconds_of(work, torch.device("cpu")))
    return _Turn(seconds, crowded=not (had_cores and have_cores_of_their_own()))
