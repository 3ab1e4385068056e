"""Megatron's training loop without a GPU: ``torch.cuda`` answered by the CPU, collectives by gloo.

:func:`activate` before Megatron is imported, and nothing else. What has no meaning on a CPU raises an error
that names it (:class:`~optimus_cc_ext.cpu_runtime.refusals.NoCpuMeaningError`); :func:`deactivate` puts
PyTorch and Megatron back.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, Literal

import torch

from optimus_cc_ext.cpu_runtime import (
    collectives,
    devices,
    megatron_patches,
    random_state,
    refusals,
    streams,
    tensor_types,
)
from optimus_cc_ext.cpu_runtime.defaults import apply_cpu_defaults
from optimus_cc_ext.cpu_runtime.patching import Patches

__all__ = ["DEVICE_VARIABLE", "activate", "apply_cpu_defaults", "deactivate", "device_choice", "is_active"]

DEVICE_VARIABLE = "OPTIMUS_CC_DEVICE"

# What is replaced in this process. Replacing attributes of torch is global by nature; this is its one record.
_installed: list[Patches] = []


def is_active() -> bool:
    """Whether this process runs Megatron on the CPU."""
    return bool(_installed)


def device_choice() -> Literal["cpu", "cuda"]:
    """The device to train on: OPTIMUS_CC_DEVICE (``cpu`` or ``cuda``) if set, else CUDA if there is any.

    Raises ValueError for another value of the variable, and RuntimeError for ``cuda`` where PyTorch sees no
    CUDA device.
    """
    if is_active():
        return "cpu"
    wanted = os.environ.get(DEVICE_VARIABLE, "")
    if wanted not in ("", "cpu", "cuda"):
        raise ValueError(f"{DEVICE_VARIABLE}={wanted!r} is not a device: set it to cpu or cuda, or unset it")
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise RuntimeError(
            f"{DEVICE_VARIABLE}=cuda, but PyTorch {torch.__version__} sees no CUDA device: unset the "
            "variable to run on the CPU, or check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    if wanted:
        return "cpu" if wanted == "cpu" else "cuda"
    return "cuda" if available else "cpu"


def activate() -> str:
    """Choose the device and, if it is the CPU, install the runtime; returns the line to print at start-up.

    To be called before Megatron is imported; a second call changes nothing. Raises what :func:`device_choice`
    raises, and RuntimeError where Megatron was imported before.
    """
    if device_choice() == "cuda":
        return f"optimus-cc: running on CUDA ({torch.cuda.device_count()} devices visible)"
    forced = os.environ.get(DEVICE_VARIABLE) == "cpu"
    reason = f"{DEVICE_VARIABLE}=cpu" if forced else "no CUDA device found"
    line = f"optimus-cc: running on CPU over gloo ({reason})"
    if is_active():
        return line

    patches = Patches()
    try:
        _install(patches)
    except BaseException:
        patches.undo()
        raise
    _installed.append(patches)
    atexit.register(_leave_in_order)
    return line


def deactivate() -> None:
    """Undo :func:`activate`: every replaced attribute and environment variable is what it was before."""
    while _installed:
        _installed.pop().undo()
    atexit.unregister(_leave_in_order)


def _leave_in_order() -> None:
    """End the process groups while the interpreter is whole.

    Megatron leaves them to the interpreter's end. A thread of gloo's that is still at work then, on a collective whose
    slowest rank is not through, aborts the process, and a run that was trained to its end has failed.
    """
    # After an exception a peer may be gone, and would be waited for.
    if getattr(sys, "last_exc", None) is None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _install(patches: Patches) -> None:
    # PyTorch's compiler would need a C++ compiler and gain nothing on models this small; the variable is for
    # child processes.
    patches.force_env("TORCHDYNAMO_DISABLE", "1")
    patches.replace(torch, "compile", _not_compiled)
    # Megatron insists on it for tensor parallelism, although it only means something to a GPU.
    patches.set_default_env("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    for part in (devices, tensor_types, random_state, streams, collectives):
        part.install(patches)
    refusals.install(patches)
    megatron_patches.check_not_too_late()
    megatron_patches.install(patches)


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """Stands in for ``torch.compile``, both as a function and as a decorator with options."""
    return (lambda function: function) if model is None else model
