"""Timing of the compressors' benchmark: torch's own timer, in turns."""

from collections.abc import Callable, Mapping

import torch
from torch.utils.benchmark import Measurement, Timer

__all__ = ["Work", "captured", "in_turn"]

Work = Callable[[], object]


def in_turn(works: Mapping[str, Work], rounds: int, seconds: float) -> dict[str, Measurement]:
    """Time all of `works` in turn, `rounds` times, so that a disturbance of the machine slows all of them.

    Args:
        seconds: how long each work is repeated in a turn, at least once, after a warm-up that does not count; 0: run it
            once.
    """
    timers = {
        name: Timer("work()", globals={"work": work}, label=name, num_threads=torch.get_num_threads())
        for name, work in works.items()
    }
    taken: dict[str, list[Measurement]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, timer in timers.items():
            taken[name].append(timer.blocked_autorange(min_run_time=seconds) if seconds else timer.timeit(1))
    return {name: Measurement.merge(measurements)[0] for name, measurements in taken.items()}


def captured(work: Work) -> Work:
    """Capture `work` as a CUDA graph; return the function that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # these runs allocate buffers, and make the libraries' handles, before the capture
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
