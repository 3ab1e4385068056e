"""``torch.cuda.FloatTensor`` and its siblings as types of CPU tensors, and ``Tensor.type()`` in CUDA's names.

Megatron tells precisions apart by these: ``isinstance(x, torch.cuda.BFloat16Tensor)``
(core/transformer/module.py) and ``x.type() == "torch.cuda.FloatTensor"`` (core/optimizer).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from optimus_cc_ext.cpu_runtime.patching import Patches

__all__ = ["install"]

DTYPE_NAMES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


class _HostTensorType(type):
    """A type whose instances are the CPU tensors of one dtype, constructed as by PyTorch's own type."""

    host_type: Any
    """PyTorch's CPU type of the same dtype, e.g. ``torch.FloatTensor``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.host_type)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cls.host_type(*args, **kwargs)

    @property
    def dtype(cls) -> torch.dtype:
        return cls.host_type.dtype


@functools.cache  # the same objects again after deactivate() and activate(): Megatron keeps them in tuples
def _host_tensor_type(dtype_name: str) -> _HostTensorType:
    name = f"{dtype_name}Tensor"
    return _HostTensorType(name, (), {"host_type": getattr(torch, name), "__module__": "torch.cuda"})


def install(patches: Patches) -> None:
    """Replace ``torch.cuda.*Tensor`` and let ``Tensor.type()`` report and accept them."""
    for dtype_name in DTYPE_NAMES:
        patches.replace(torch.cuda, f"{dtype_name}Tensor", _host_tensor_type(dtype_name))

    type_of = torch.Tensor.type

    @functools.wraps(type_of)
    def type_or_convert(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = type_of(self)
            return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        elif isinstance(dtype, _HostTensorType):
            dtype = dtype.host_type
        return type_of(self, dtype, *args, **kwargs)

    patches.replace(torch.Tensor, "type", type_or_convert)
