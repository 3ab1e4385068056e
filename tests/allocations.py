"""Watch of the requests that code makes of torch: new memory for tensors, values on the host, and memory that lives."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Living", "Watch"]

HOST_READS = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.nonzero.default")
"""Operators that bring a tensor's value, or a size that depends on it, to the host: on a GPU each waits for the
device.
"""


class Watch(TorchDispatchMode):
    """Dispatch mode that counts operators, and notes those that return new memory and those that read on the host.

    It sees the tensors that torch returns, but not the memory that a kernel uses inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[str] = []
        self.read_by_host: list[str] = []
        self.called: list[str] = []

    @property
    def calls(self) -> int:
        """Number of operators that torch ran."""
        return len(self.called)

    def count(self, name: str) -> int:
        """Return the number of operators whose names contain `name`."""
        return sum(name in called for called in self.called)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.called.append(str(func))
        result = func(*args, **(kwargs or {}))
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _memory(leaf) not in given:
                self.allocated.append(f"{func} {tuple(leaf.shape)}")
        if str(func) in HOST_READS:
            self.read_by_host.append(str(func))
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Living(TorchDispatchMode):
    """Dispatch mode that adds up the bytes of all storages in use, and notes the largest sum.

    It sees the storages that an operator returns. It does not see the memory that an operator uses inside, and none of
    the transport's: gloo's thread keeps clones of what it sends, with compression and without.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            self.now -= nbytes
            del self._storages[key]

        # torch keeps the Python object of a storage as long as the storage lives.
        self._storages[key] = weakref.ref(storage, freed)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
