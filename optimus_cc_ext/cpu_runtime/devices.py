"""The CPU in the place of ``cuda``: device queries, tensor factories, conversions, memory counters.

A device that says ``cuda`` (a string, a ``torch.device`` or an index) means the CPU wherever PyTorch's Python
functions take a device. Nothing is intercepted per operator: only functions that accept a ``device`` are
wrapped, and they cost one dictionary look-up more. What reaches PyTorch's C++ with a CUDA device by another
road still fails there, loudly.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _device as torch_device_mode

from optimus_cc_ext.cpu_runtime.patching import Patches

__all__ = ["HostProperties", "host_device", "install"]

CPU = torch.device("cpu")

# The factories that torch.utils._device leaves out on purpose (a like-function keeps the device of its
# argument), but which accept a device all the same.
LIKE_FACTORIES = (
    "empty_like",
    "full_like",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
)
NEW_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def host_device(device: Any) -> Any:
    """``device``, or the CPU where it is one of CUDA's: "cuda", "cuda:1", torch.device("cuda") or 1."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, int):
        return CPU
    return device


def _on_host[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with its keyword ``device`` read by :func:`host_device`."""

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> R:
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = host_device(device)
        return function(*args, **kwargs)

    return build


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProperties:
    """What ``torch.cuda.get_device_properties`` answers: the machine's processor and memory."""

    name: str
    """Always "cpu"."""
    total_memory: int
    """Physical memory in bytes."""
    multi_processor_count: int
    """Number of logical processors."""
    major: int = 0
    """Compute capability; 0.0 is older than every GPU, so no feature of a GPU is inferred from it."""
    minor: int = 0


def _device_count() -> int:
    # Read at every call: ranks that are forked from one prepared process learn it after the fork.
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class _Index:
    """The index of the current device: what was set, as on a GPU, although every index is the same CPU."""

    def __init__(self) -> None:
        self._value = 0

    def get(self) -> int:
        return self._value

    def set(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:  # without an index there is nothing to do, as on a GPU
            self._value = index


class _DeviceContext:
    """Stands in for ``torch.cuda.device`` and ``device_of``: every device is the same CPU."""

    def __init__(self, device: Any) -> None:
        self.idx = device if isinstance(device, int) else -1

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        return None


def _properties(device: Any = None) -> HostProperties:
    return HostProperties(
        name="cpu",
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def _memory_info(device: Any = None) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _no_bytes(device: Any = None) -> int:
    return 0


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _install_queries(patches: Patches) -> None:
    index = _Index()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": lambda call, **kwargs: call(),
        "device_count": _device_count,
        "set_device": index.set,
        "current_device": index.get,
        "device": _DeviceContext,
        "device_of": _DeviceContext,
        "synchronize": _nothing,
        "get_device_name": lambda device=None: "cpu",
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": _properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: False,
        "get_arch_list": lambda: [],
        "mem_get_info": _memory_info,
        # No byte of a GPU's memory is in use; Megatron logs these as such.
        "memory_stats": lambda device=None: defaultdict(int),
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "reset_accumulated_memory_stats": _nothing,
        "reset_max_memory_allocated": _nothing,
        "reset_max_memory_cached": _nothing,
    }
    counters = ("allocated", "reserved", "cached")
    answers |= {f"{prefix}memory_{name}": _no_bytes for prefix in ("", "max_") for name in counters}
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.memory):
            if module is torch.cuda or hasattr(module, name):
                patches.replace(module, name, answer)

    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        patches.replace(torch.cuda.nvtx, name, _nothing)

    # A CUDA build of PyTorch names CUDA as the accelerator even where there is none; the DataLoader asks for
    # it.
    patches.replace(torch.accelerator, "is_available", lambda: False)
    patches.replace(torch.accelerator, "device_count", lambda: 0)
    patches.replace(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def _install_factories(patches: Patches) -> None:
    # The mode behind `with torch.device(...)` recognises factories by identity: let it collect the originals
    # first.
    factories = torch_device_mode._device_constructors()
    for module in (torch, torch.fft, torch.nested):
        for name, function in list(vars(module).items()):
            if callable(function) and _is_in(function, factories):
                patches.replace(module, name, _on_host(function))
    for name in LIKE_FACTORIES:
        patches.replace(torch, name, _on_host(getattr(torch, name)))

    mode = torch_device_mode.DeviceContext
    enter_mode = mode.__init__
    patches.replace(mode, "__init__", lambda self, device: enter_mode(self, host_device(device)))

    autocast = torch.amp.autocast_mode.autocast
    begin_autocast = autocast.__init__

    def autocast_on_host(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            dtype = dtype or torch.float16  # what CUDA's autocast takes by default
        begin_autocast(self, device_type, dtype, *args, **kwargs)

    patches.replace(autocast, "__init__", autocast_on_host)


def _is_in(function: Any, functions: set[Any]) -> bool:
    try:
        return function in functions
    except TypeError:  # not hashable, so not one of them
        return False


def _install_conversions(patches: Patches) -> None:
    convert = torch.Tensor.to

    @functools.wraps(convert)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], str | int | torch.device):
            args = (host_device(args[0]), *args[1:])
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = host_device(device)
        return convert(self, *args, **kwargs)

    def cuda(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        return convert(self, CPU, non_blocking=non_blocking, memory_format=memory_format)

    # torch.nn.Module.to and .cuda end in these two for each parameter and buffer.
    patches.replace(torch.Tensor, "to", to)
    patches.replace(torch.Tensor, "cuda", cuda)
    patches.replace(torch.Tensor, "record_stream", _nothing)
    for name in NEW_METHODS:
        patches.replace(torch.Tensor, name, _on_host(getattr(torch.Tensor, name)))


def install(patches: Patches) -> None:
    """Make ``cuda`` mean the CPU in PyTorch's Python interface."""
    _install_queries(patches)
    _install_factories(patches)
    _install_conversions(patches)
