"""Reads of tensors by the host: on a GPU each of them waits for the work in front of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretended_streams import READ_BY_HOST


class _Operations(TorchDispatchMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READ_BY_HOST:
            self._reads.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Return a list that gets the name of each operation with which the host reads values while the context lasts."""
    reads: list[str] = []
    tolist = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        reads.append("tolist")
        return tolist(tensor)

    with mock.patch.object(torch.Tensor, "tolist", noted), _Operations(reads):
        yield reads
