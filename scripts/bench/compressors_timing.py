"""How the compressors' benchmark measures: alternating repetitions, their spread, and what the machine can do."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = [
    "Sample",
    "Work",
    "captured",
    "copy_bandwidth",
    "gemm_rate",
    "have_cores_of_their_own",
    "in_turn",
    "seconds_of",
]

Work = Callable[[], object]

_WARM_UP_SECONDS = 0.2
"""A processor that was idle takes a while to run at its full speed, and its caches to fill."""


@dataclass(frozen=True)
class Sample:
    """Seconds of one piece of work, over its repetitions."""

    median: float
    fastest: float
    first_quartile: float
    third_quartile: float
    repetitions: int
    crowded: int = 0
    """How many of the repetitions had to be taken while threads shared a core."""

    @classmethod
    def of(cls, seconds: list[float], crowded: int = 0) -> "Sample":
        """Of a list of one or more."""
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        return cls(middle, min(seconds), low, high, len(seconds), crowded)


def in_turn(works: dict[str, Work], device: torch.device, repeats: int) -> dict[str, Sample]:
    """Time all of `works` in turn, again and again, so that what slows the machine down slows all of them.

    What each of them does in its first `_WARM_UP_SECONDS`, once at least, does not count.
    """
    for work in works.values():
        warm = time.monotonic() + _WARM_UP_SECONDS
        while True:
            seconds_of(work, device)
            if time.monotonic() > warm:
                break
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            seconds[name].append(seconds_of(work, device))
    return {name: Sample.of(taken) for name, taken in seconds.items()}


def seconds_of(work: Work, device: torch.device) -> float:
    """How long `work` takes once: on a GPU by events on the device, on a CPU by its clock."""
    return _on_gpu(work) if device.type == "cuda" else _on_cpu(work)


def _on_cpu(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _on_gpu(work: Work) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def captured(work: Work) -> Work:
    """`work` as a CUDA graph: what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # buffers are allocated, and the libraries' handles made, before the capture
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def have_cores_of_their_own() -> bool:
    """Whether torch's threads multiply faster together than one of them alone by three quarters of their number.

    A virtual machine's processors may find themselves on one core of its host: two threads are then hardly faster than
    one, and a time on two threads is not meant to say that. Takes 10 ms.
    """
    threads = torch.get_num_threads()
    together = _fastest_small_product()
    try:
        torch.set_num_threads(1)
        return _fastest_small_product() >= 0.75 * threads * together
    finally:
        torch.set_num_threads(threads)


def _fastest_small_product() -> float:
    a = torch.ones(256, 256)
    out = torch.empty_like(a)
    return min(_on_cpu(lambda: torch.mm(a, a, out=out)) for _ in range(15))


def copy_bandwidth(values: int, device: torch.device, repeats: int) -> float:
    """Bytes per second, read and written together, of copying a tensor of so many fp32 values: the fastest copy."""
    source = torch.zeros(values, device=device)
    target = torch.empty_like(source)
    copies = in_turn({"copy": lambda: target.copy_(source)}, device, repeats)["copy"]
    return 2 * source.nbytes / copies.fastest


def gemm_rate(size: int, device: torch.device, repeats: int) -> float:
    """Operations per second of the fastest size x size fp32 product."""
    generator = torch.Generator(device).manual_seed(5)
    a, b = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / in_turn({"mm": lambda: torch.mm(a, b, out=out)}, device, repeats)["mm"].fastest
