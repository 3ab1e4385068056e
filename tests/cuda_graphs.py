"""CUDA graphs of work that a training step repeats."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["assert_replays_without_synchronisation"]


def assert_replays_without_synchronisation(work: Callable[[], None], results: Sequence[Tensor]) -> None:
    """Assert that `work`, which writes `results`, waits for nothing, and that a CUDA graph of it writes the same
    bits.
    """
    work()
    expected = [each.clone() for each in results]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each in results:
        each.zero_()
    graph.replay()
    assert all(torch.equal(found, wanted) for found, wanted in zip(results, expected, strict=True))
