"""On a CPU every contender of the compressors' benchmark has a process of its own, as in a training, which has one.

In one process they would share the allocator: what one has freed spares the other the page faults of its temporaries,
or costs it some. And each would find the caches full of the other's tensors. In turn, again and again, one process
works while the others wait. The beginning of a turn does not count: a processor that was idle takes a while to run at
its full speed, as it does in a training, and to fill its caches.
"""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from compressors_timing import Sample, Work, in_turn, seconds_of

__all__ = ["Contender", "alternate"]

Contender = Callable[[], Mapping[str, Work]]
"""Makes its tensors, in the process that calls it, and checks what it is going to do. Must be picklable."""

_IMPORTED_ONCE = ["torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "matplotlib.figure"]
"""What takes long to import; the server finds installed packages only, not the modules beside this one."""

_SECONDS_TO_BE_READY, _SECONDS_FOR_A_TURN = 300.0, 600.0
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
) -> dict[str, Sample]:
    """Time every piece of work of all contenders; its name is the contender's, and its own after a comma if it has one.

    Args:
        rounds: how often each contender has its turn in a process. A first round does not count.
        in_a_row: repetitions of a piece of work in a turn that count. Where there are several, those of its first
            `warm_up` seconds, at least one, do not.
        cold: the caches are filled with something else before every repetition, on a CPU.
        processes: how many each contender has, one after the other, on a CPU: where its memory lies, and whether the
            allocator keeps it, is settled when a process begins. The times of all of them make one sample.

    Raises:
        SystemExit: a contender's check failed, or its process did not answer in time.
    """
    if device.type == "cuda":
        works = {_joined(name, what): w for name, make in contenders.items() for what, w in make().items()}
        return in_turn(works, device, rounds * in_a_row)
    seconds: dict[str, list[float]] = {}
    for _ in range(processes):
        for name, taken in _one_life(contenders, rounds, (in_a_row, warm_up, cold)).items():
            seconds.setdefault(name, []).extend(taken)
    return {name: Sample.of(taken) for name, taken in seconds.items()}


def _one_life(
    contenders: Mapping[str, Contender], rounds: int, how: tuple[int, float, bool]
) -> dict[str, list[float]]:  # fmt: skip
    """The seconds of all turns of one process for each contender."""
    # Started by a server that has imported torch but never used its threads: a child of this process, which has used
    # them, would wait for threads that it does not have.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    workers: dict[str, tuple[Any, Connection]] = {}
    seconds: dict[str, list[float]] = {}
    try:
        for name, make in contenders.items():
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, make, torch.get_num_threads(), *how), daemon=True)
            process.start()
            there.close()
            workers[name] = process, here
            _answer(name, here, _SECONDS_TO_BE_READY)
        for turn in range(rounds + 1):
            for name, (_, connection) in workers.items():
                for what, taken in _answer(name, connection, _SECONDS_FOR_A_TURN, asked=True).items():
                    if turn > 0:
                        seconds.setdefault(_joined(name, what), []).extend(taken)
    finally:
        for process, connection in workers.values():
            connection.close()
            process.kill()
            process.join()
    return seconds


def _joined(name: str, what: str) -> str:
    return f"{name}, {what}" if what else name


def _answer(name: str, connection: Connection, limit: float, *, asked: bool = False) -> dict[str, list[float]]:
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


def _serve(connection: Connection, make: Contender, threads: int, in_a_row: int, warm_up: float, cold: bool) -> None:
    """The life of a contender's process: a turn for every message."""
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    filler = torch.zeros(_EVICTING_VALUES if cold else 0)
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
        taken: dict[str, list[float]] = {}
        for what, work in works.items():
            warm = time.monotonic() + warm_up
            while in_a_row > 1:
                work()
                if time.monotonic() > warm:
                    break
            taken[what] = []
            for _ in range(in_a_row):
                filler.add_(1.0)
                taken[what].append(seconds_of(work, device))
        connection.send(taken)
