"""Sanitizer of kernels in Triton's interpreter: reports what a GPU would crash on, or do in any order.

    with sanitized() as reports:
        kernel[grid](...)
    assert not reports

- Bounds: a launch loads and stores elements of the tensors that it got, and nothing else. The interpreter mostly finds
  zeros behind a tensor, a GPU anything. The gaps of a strided tensor are outside of it.
- Order: in one launch no byte is stored twice, loaded once it was stored, or stored once another program loaded it.
  Programs, and the threads of one program, have no order on a GPU; the interpreter runs one after the other.
- Multiples: values are the multiples that `tl.multiple_of` claims, because the compiler loads that many at once.

In the interpreter every test is sanitized (conftest.py).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["sanitized"]

_SEVERAL = -1
"""Reader of a byte that more than one program has loaded."""


@dataclass
class _Storage:
    """Shadow of a storage in which arguments of a launch lie: what is known of each of its bytes."""

    address: int
    elements: np.ndarray
    """Sizes of the arguments' elements that begin at each byte, added up; a size is a power of two."""

    stored: np.ndarray
    reader: np.ndarray
    """1 + the number of the program that has loaded each byte, `_SEVERAL`, or 0."""

    arguments: list[str] = field(default_factory=list)


class _Launch:
    """Accesses of one launch of the kernel `name` to its arguments."""

    def __init__(self, name: str, tensors: Iterable[torch.Tensor], reports: list[str]) -> None:
        self.name, self._reports = name, reports
        shadows: dict[int, _Storage] = {}
        for tensor in tensors:
            address, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
            if address not in shadows:
                zeros = [np.zeros(nbytes, kind) for kind in (np.uint8, bool, np.int32)]
                shadows[address] = _Storage(address, *zeros)
            size, shadow = tensor.element_size(), shadows[address]
            begins = shadow.elements[tensor.storage_offset() * size :]
            strides = [stride * size for stride in tensor.stride()]
            np.lib.stride_tricks.as_strided(begins, tensor.shape, strides)[...] |= size
            shadow.arguments.append(f"{tensor.dtype} {tuple(tensor.shape)}")
        self._storages = sorted(shadows.values(), key=lambda shadow: shadow.address)
        self._addresses = np.array([shadow.address for shadow in self._storages], np.int64)

    def allowed(self, builder: Any, access: str, pointers: Any, mask: Any) -> Any:
        """Check the pointers that `mask` selects; return the mask without those that no argument allows."""
        selected = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        places = np.flatnonzero(selected)
        addresses = pointers.data.reshape(-1)[places].astype(np.int64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        which = np.searchsorted(self._addresses, addresses, side="right") - 1
        for index in np.unique(which):
            at, begins = places[which == index], addresses[which == index]
            storage = self._storages[max(index, 0)]
            begins = begins - storage.address
            inside = (begins >= 0) & (begins + size <= storage.elements.size)
            inside[inside] &= (storage.elements[begins[inside]] & size) > 0
            if not inside.all():
                self._report(builder, access, f"{(~inside).sum()} of {begins.size} outside of its tensors", storage)
                selected.reshape(-1)[at[~inside]] = False
            self._note(builder, access, storage, (begins[inside][:, None] + np.arange(size)).reshape(-1))
        return interpreter.TensorHandle(selected, tl.int1)

    def _note(self, builder: Any, access: str, storage: _Storage, touched: np.ndarray) -> None:
        x, y, z = builder.grid_idx
        program = 1 + x + builder.grid_dim[0] * (y + builder.grid_dim[1] * z)
        readers = storage.reader[touched]
        if storage.stored[touched].any():
            self._report(builder, access, "race: bytes that this launch has stored", storage)
        if access == "load":
            storage.reader[touched] = np.where((readers == 0) | (readers == program), program, _SEVERAL)
            return
        if not np.isin(readers, (0, program)).all():
            self._report(builder, access, "race: bytes that another program has loaded", storage)
        if np.unique(touched).size < touched.size:
            self._report(builder, access, "race: bytes that the same store writes twice", storage)
        storage.stored[touched] = True

    def _report(self, builder: Any, access: str, what: str, storage: _Storage) -> None:
        near = ", ".join(storage.arguments)
        self._reports.append(f"{self.name}, program {builder.grid_idx}: {access}: {what} (near {near})")


@contextmanager
def sanitized() -> Iterator[list[str]]:
    """Check every launch in the interpreter meanwhile; yield the list to which reports will be added."""
    reports: list[str] = []
    launches: list[_Launch] = []
    executor, builder, handle = interpreter.GridExecutor, interpreter.InterpreterBuilder, interpreter.TensorHandle
    call, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store
    set_attr = handle.set_attr

    def checked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[:] = [_Launch(self.fn.__name__, _tensors((*args, *kwargs.values())), reports)]
        return call(self, *args, **kwargs)

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, launches[0].allowed(self, "load", pointers, mask), *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, launches[0].allowed(self, "store", pointers, mask), *rest)

    def checked_attr(self: Any, name: str, values: list[int]) -> None:
        if name == "tt.divisibility" and (wrong := self.data[self.data % values[-1] != 0]).size:
            reports.append(f"{launches[0].name}: multiple_of: {wrong.flat[0]} is no multiple of {values[-1]}")
        set_attr(self, name, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__call__", checked_call)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        patch.setattr(handle, "set_attr", checked_attr)
        yield reports


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)
