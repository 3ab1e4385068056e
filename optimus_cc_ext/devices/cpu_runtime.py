"""Choose the device of a rank; on a CPU, let ``torch.cuda`` be answered by the CPU, and collectives by gloo.

:func:`activate` before Megatron is imported, and nothing else. What has no meaning on a CPU raises an error
that names it (:class:`~optimus_cc_ext.devices.torch_cuda.NoCpuMeaningError`); :func:`deactivate` puts PyTorch and
Megatron back.
"""

from __future__ import annotations

import atexit
import glob
import os
import sys
from typing import Any

import torch

from optimus_cc_ext.devices import cuda_means_cpu, megatron_on_cpu, shared_gpu, torch_cuda
from optimus_cc_ext.devices.megatron_on_cpu import apply_cpu_defaults
from optimus_cc_ext.patching import Patches

__all__ = ["DEVICE_VARIABLE", "activate", "apply_cpu_defaults", "deactivate", "device_choice", "is_active"]

DEVICE_VARIABLE = "OPTIMUS_CC_DEVICE"
GPU_FILES = "/dev/nvidia[0-9]*"
"""What NVIDIA's driver makes, one a GPU, whether or not PyTorch can use it."""

# What is replaced in this process. Replacing attributes of torch is global by nature; this is its one record.
_installed: list[Patches] = []


def is_active() -> bool:
    """Whether this process runs Megatron on the CPU."""
    return bool(_installed)


def device_choice() -> shared_gpu.Device:
    """The device to train on: OPTIMUS_CC_DEVICE (``cpu``, ``cuda``, ``shared-gpu``) if set, else CUDA if there is any.

    Raises:
        ValueError: the variable has another value.
        RuntimeError: it is ``cuda`` or ``shared-gpu``, and PyTorch sees no CUDA device; or it is not set, and there is
            one all the same.
    """
    wanted = os.environ.get(DEVICE_VARIABLE, "")
    if is_active() or wanted == "cpu":
        return "cpu"
    if wanted not in ("", "cuda", shared_gpu.NAME):
        raise ValueError(
            f"{DEVICE_VARIABLE}={wanted!r} is not a device: set it to cpu, cuda or {shared_gpu.NAME}, or unset it"
        )
    if torch.cuda.is_available():
        return "shared-gpu" if wanted == shared_gpu.NAME else "cuda"
    if wanted:
        raise RuntimeError(
            f"{DEVICE_VARIABLE}={wanted}, but PyTorch {torch.__version__} sees no CUDA device: unset the "
            "variable to run on the CPU, or check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    if gpus := glob.glob(GPU_FILES):
        raise RuntimeError(
            f"this machine has a GPU ({min(gpus)}), but PyTorch {torch.__version__}, made for CUDA "
            f"{torch.version.cuda or 'no version of it'}, sees none: check that the driver is new enough (nvidia-smi "
            f"says for which CUDA) and CUDA_VISIBLE_DEVICES, or set {DEVICE_VARIABLE}=cpu to train on the CPU"
        )
    return "cpu"


def activate() -> str:
    """Choose the device and, if it is the CPU, install the runtime; returns the line to print at start-up.

    A second call changes nothing.

    Raises:
        ValueError: as :func:`device_choice`.
        RuntimeError: likewise, or Megatron was imported before, or this rank's GPU cannot be used.
        OptimusError: as :func:`optimus_cc_ext.devices.shared_gpu.activate`.
    """
    choice = device_choice()
    if choice != "cpu":
        megatron_on_cpu.use_compiled_helpers()
    if choice == "shared-gpu":
        return shared_gpu.activate()
    if choice == "cuda":
        _take_gpu(int(os.environ.get("LOCAL_RANK", "0")))
        return f"optimus-cc: running on CUDA ({torch.cuda.device_count()} devices visible)"
    if not is_active():
        with Patches() as patches:
            _install(patches)
            _installed.append(patches.pop_all())
        atexit.register(_leave_in_order)
    forced = os.environ.get(DEVICE_VARIABLE) == "cpu"
    return f"optimus-cc: running on CPU over gloo ({f'{DEVICE_VARIABLE}=cpu' if forced else 'no CUDA device found'})"


def _take_gpu(number: int) -> None:
    """As Megatron will; one that is lost or broken is better known before any rank waits for this one."""
    try:
        torch.cuda.set_device(number)
    except RuntimeError as error:
        raise RuntimeError(
            f"GPU {number}, of {torch.cuda.device_count()} that PyTorch sees here, cannot be used "
            f"({str(error).splitlines()[0]}): look at nvidia-smi and CUDA_VISIBLE_DEVICES, start no more ranks than "
            f"there are GPUs, or set {DEVICE_VARIABLE}={shared_gpu.NAME} to share them"
        ) from error


def deactivate() -> None:
    """Undo :func:`activate`: every replaced attribute and environment variable is what it was before."""
    while _installed:
        _installed.pop().close()
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
    patches.setenv("TORCHDYNAMO_DISABLE", "1")
    patches.replace(torch, "compile", _not_compiled)
    # Megatron insists on it for tensor parallelism, although it only means something to a GPU.
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        patches.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    torch_cuda.install(patches)
    cuda_means_cpu.install(patches)
    torch_cuda.refuse_the_rest(patches)
    megatron_on_cpu.install(patches)


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """Stands in for ``torch.compile``, both as a function and as a decorator with options."""
    return (lambda function: function) if model is None else model
