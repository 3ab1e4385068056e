"""Choose the device of a rank; on a CPU, let the CPU stand in for ``torch.cuda``, and gloo for NCCL.

Call :func:`activate` before Megatron is imported; nothing else is needed. A CUDA function that has no meaning on a CPU
raises an error with its name (:class:`~optimus_cc_ext.tools.cpu.torch_cuda.NoCpuMeaningError`). :func:`deactivate`
restores PyTorch and Megatron.
"""

from __future__ import annotations

import atexit
import glob
import os
import sys
from typing import Any

import torch

from optimus_cc_ext.patching import Patches
from optimus_cc_ext.tools.cpu import cuda_means_cpu, driver, megatron_on_cpu, shared_gpu, torch_cuda

DEVICE_VARIABLE = "OPTIMUS_CC_DEVICE"
GPU_FILES = "/dev/nvidia[0-9]*"
"""Device files of NVIDIA's driver, one for each GPU, whether or not PyTorch can use the GPU."""

# The attributes that are replaced in this process. Replacing attributes of torch is global by nature, and this list is
# its only record.
_installed: list[Patches] = []


def is_active() -> bool:
    """Return whether this process runs Megatron on the CPU."""
    return bool(_installed)


def device_choice() -> shared_gpu.Device:
    """Return the device to train on: OPTIMUS_CC_DEVICE (``cpu``, ``cuda``, ``shared-gpu``) if set, else CUDA if there
    is any.

    Raises:
        ValueError: the variable has another value.
        RuntimeError: the variable is ``cuda`` or ``shared-gpu``, but PyTorch sees no CUDA device; or the variable is
            not set, PyTorch sees no CUDA device, and the machine has one.
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
        cure = driver.too_old(torch.version.cuda, driver.newest_cuda()) or "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        raise RuntimeError(
            f"this machine has a GPU ({min(gpus)}), but PyTorch {torch.__version__}, made for CUDA "
            f"{torch.version.cuda or 'no version of it'}, sees none: {cure}, or set {DEVICE_VARIABLE}=cpu to train on "
            "the CPU"
        )
    return "cpu"


def activate() -> str:
    """Choose the device and, if it is the CPU, install the runtime; return the line to print at start-up.

    A second call changes nothing.

    Raises:
        ValueError: OPTIMUS_CC_DEVICE is no device.
        RuntimeError: `device_choice` found no device, Megatron was imported before, or this rank's GPU cannot be used.
        OptimusError: the GPU cannot be shared (:func:`optimus_cc_ext.tools.cpu.shared_gpu.activate`).
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
    """Set the CUDA device as Megatron will, so that a lost or broken GPU fails before other ranks wait for this
    rank.
    """
    try:
        torch.cuda.set_device(number)
    except RuntimeError as error:
        raise RuntimeError(
            f"GPU {number}, of {torch.cuda.device_count()} that PyTorch sees here, cannot be used "
            f"({str(error).splitlines()[0]}): look at nvidia-smi and CUDA_VISIBLE_DEVICES, start no more ranks than "
            f"there are GPUs, or set {DEVICE_VARIABLE}={shared_gpu.NAME} to share them"
        ) from error


def deactivate() -> None:
    """Undo :func:`activate`: restore every replaced attribute and environment variable."""
    while _installed:
        _installed.pop().close()
    atexit.unregister(_leave_in_order)


def _leave_in_order() -> None:
    """End the process groups while the interpreter is still intact.

    Megatron leaves its process groups to the end of the interpreter. If a gloo thread is still at work then, on a
    collective that the slowest rank has not finished, it aborts the process, and a run that has trained to its end
    fails.
    """
    # After an exception a peer may be gone, and destroying the process group would wait for it.
    if getattr(sys, "last_exc", None) is None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _install(patches: Patches) -> None:
    # PyTorch's compiler would need a C++ compiler, and gain nothing on models this small. Child processes read the
    # variable.
    patches.setenv("TORCHDYNAMO_DISABLE", "1")
    patches.replace(torch, "compile", _not_compiled)
    # Megatron insists on a value of CUDA_DEVICE_MAX_CONNECTIONS, although it only has a meaning on a GPU: 1 for tensor
    # parallelism, and any other one for FSDP2.
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        patches.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8" if "--use-torch-fsdp2" in sys.argv else "1")

    torch_cuda.install(patches)
    cuda_means_cpu.install(patches)
    torch_cuda.refuse_the_rest(patches)
    megatron_on_cpu.install(patches)


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """Stand in for ``torch.compile``, both as a function and as a decorator with options: return the model as it is."""
    return (lambda function: function) if model is None else model
