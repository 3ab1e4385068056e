"""Work that a GPU does beside the backward pass; on a CPU it is simply done."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["SideStream"]


class SideStream:
    """A CUDA stream of our own, ordered with the current one where work is handed over and where it is needed.

    What runs here must not share scratch memory with what runs elsewhere: only its user knows when it is free.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is called inside starts after everything that the current stream was given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream is given from now on starts after the work."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
