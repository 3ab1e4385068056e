"""The CPU in the place of ``cuda``: tensor factories, conversions, tensor types, and gloo's all-gathers.

Wherever PyTorch's Python functions take a device, one that names ``cuda`` (a string, a ``torch.device`` or an index)
means the CPU. Nothing is intercepted per operator: only functions that accept a ``device`` are wrapped. A CUDA device
that reaches PyTorch's C++ by another way still raises an error there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _device as torch_device_mode

from optimus_cc_ext.patching import Patches

CPU = torch.device("cpu")

# Megatron distinguishes precisions by these types: isinstance(x, torch.cuda.BFloat16Tensor)
# (core/transformer/module.py) and x.type() == "torch.cuda.FloatTensor" (core/optimizer).
TENSOR_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")

# torch.distributed._coalescing_manager calls these methods, under their older names before torch 2.12.
COALESCED = {"all_gather_single_coalesced": "all_gather_single", "allgather_into_tensor_coalesced": "_allgather_base"}


def _host_device(device: Any) -> Any:
    """Return ``device``, or the CPU if ``device`` is one of CUDA's: "cuda", "cuda:1", torch.device("cuda") or 1."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.partition(":")[0] == "cuda" else device
    return CPU if isinstance(device, int) else device


def _build(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("device") is not None:
        kwargs["device"] = _host_device(kwargs["device"])
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False  # pinned memory serves copies to a GPU, and needs a GPU
    return factory(*args, **kwargs)


def _to(convert: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], str | int | torch.device):
        args = (_host_device(args[0]), *args[1:])
    return _build(convert, tensor, *args, **kwargs)


def _cuda(
    original: Any, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:  # fmt: skip
    return tensor.to(CPU, non_blocking=non_blocking, memory_format=memory_format)


def _type(type_of: Callable[..., Any], tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        name = type_of(tensor)
        return name.replace("torch.", "torch.cuda.", 1) if tensor.device.type == "cpu" else name
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return type_of(tensor, dtype, *args, **kwargs)


def _autocast(
    begin: Callable[..., None], self: Any, device_type: str, dtype: Any = None, *args: Any, **kw: Any
) -> None:
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.float16  # float16 is the default dtype of CUDA's autocast
    begin(self, device_type, dtype, *args, **kw)


def _one_by_one(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Make a coalesced all-gather over gloo that gathers one tensor at a time.

    In PyTorch 2.13 two coalesced all-gathers under way in one process group corrupt memory: gloo's threads, in
    `AsyncAllgatherCoalescedWork`, end the process with "malloc(): unaligned tcache chunk" or a segmentation fault, once
    in a few minutes, or wait for ever. Megatron has several under way with --overlap-param-gather, one for each bucket.
    The plain all-gather gives the same result without the fault, and on a CPU coalescing gains nothing.
    """

    def all_gather_coalesced(
        group: dist.ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *options: Any
    ) -> Any:
        works = [gather(group, into, tensor, *options) for into, tensor in zip(outputs, inputs, strict=True)]
        return SimpleNamespace(wait=lambda *timeout: all([work.wait(*timeout) for work in works]))

    return all_gather_coalesced


def install(patches: Patches) -> None:
    """Make ``cuda`` mean the CPU in PyTorch's Python interface."""
    # The mode behind `with torch.device(...)` recognises factories by identity, so it has to collect the originals
    # first.
    factories = set(map(id, torch_device_mode._device_constructors()))
    for module in (torch, torch.fft, torch.nested):
        for name in [name for name, value in vars(module).items() if id(value) in factories]:
            patches.wrap(module, name, _build)
    # The ..._like factories keep the device of their argument, but accept another one.
    for name in [name for name in vars(torch) if name.endswith("_like")]:
        patches.wrap(torch, name, _build)
    for name in [name for name in dir(torch.Tensor) if name.startswith("new_")]:
        patches.wrap(torch.Tensor, name, _build)
    patches.wrap(
        torch_device_mode.DeviceContext, "__init__", lambda init, self, device: init(self, _host_device(device))
    )
    patches.wrap(torch.amp.autocast_mode.autocast, "__init__", _autocast)
    patches.wrap(
        DeviceMesh, "from_group",
        lambda make, group, device, *args, **kwargs: make(group, str(_host_device(device)), *args, **kwargs),
    )  # fmt: skip

    # torch.nn.Module.to and torch.nn.Module.cuda call these two methods for each parameter and buffer.
    patches.wrap(torch.Tensor, "to", _to)
    patches.wrap(torch.Tensor, "cuda", _cuda)
    patches.replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name in TENSOR_TYPES:
        patches.replace(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    patches.wrap(torch.Tensor, "type", _type)

    for coalesced, single in COALESCED.items():
        if hasattr(dist.ProcessGroup, coalesced) and hasattr(dist.ProcessGroup, single):
            patches.replace(dist.ProcessGroup, coalesced, _one_by_one(getattr(dist.ProcessGroup, single)))
