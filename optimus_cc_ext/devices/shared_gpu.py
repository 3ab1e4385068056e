"""Several ranks on one GPU (`OPTIMUS_CC_DEVICE=shared-gpu`): real CUDA kernels, with collectives through the host.

It is meant for proofs on one machine and for CI. Its times mean nothing, because every message goes through host memory
and the ranks take turns on the GPU.
"""

import os
from typing import Literal

import torch

from optimus_cc_ext.devices.staged_gloo import NAME, register
from optimus_cc_ext.errors import OptimusError

__all__ = ["NAME", "Device", "activate", "check_one_machine", "device_for", "is_active", "memory_share", "ranks_on"]

Device = Literal["cpu", "cuda", "shared-gpu"]

CONTEXT_BYTES = 1 << 29
"""Bytes that each process needs on a GPU for CUDA itself and for the kernels that it loads, outside of its share: half
a GiB.
"""

LEAST_BYTES = 1 << 30
"""Smallest share of a GPU's memory that is accepted. A smaller share holds no model that is worth a GPU."""


def is_active() -> bool:
    """Return whether this process was asked to share its GPU."""
    return os.environ.get("OPTIMUS_CC_DEVICE") == NAME


def device_for(ranks: int, gpus: int) -> Device:
    """Return the device for ranks of one machine: a GPU for each rank, else all GPUs shared, else the CPU."""
    if gpus == 0:
        return "cpu"
    return "cuda" if gpus >= ranks else "shared-gpu"


def ranks_on(device: int, ranks: int, gpus: int) -> int:
    """Return how many ranks of this machine share the GPU `device`: rank r is on GPU r mod `gpus`."""
    return len(range(device, ranks, gpus))


def memory_share(ranks: int, total: int, free: int) -> float:
    """Return the share of a GPU's memory that each of its ranks may allocate.

    Args:
        ranks: number of ranks that share the GPU.
        total, free: the GPU's bytes, and its bytes that no process uses.

    Raises:
        OptimusError: the share would be smaller than `LEAST_BYTES`.
    """
    share = total / ranks - CONTEXT_BYTES
    if min(share, free) < LEAST_BYTES:
        raise OptimusError(
            f"OPTIMUS_CC_DEVICE={NAME}: {ranks} ranks on a GPU of {_gib(total)}, {_gib(free)} of it free, leave less "
            f"than {_gib(LEAST_BYTES)} for each: end other processes on the GPU, or start fewer ranks"
        )
    return share / total


def check_one_machine(world_size: int, local_world_size: int) -> None:
    """Raise OptimusError if the run has ranks on other machines."""
    if world_size != local_world_size:
        raise OptimusError(
            f"OPTIMUS_CC_DEVICE={NAME}: the run has {world_size} ranks, but only {local_world_size} of them on this "
            "machine, and GPUs are shared on one machine only. Start all ranks on one machine, or unset the variable "
            "if every rank has a GPU"
        )


def activate() -> str:
    """Set this rank's GPU and its share of the memory, and register the backend; return the line to print at start-up.

    Raises:
        OptimusError: the run has more than one machine, or the GPU too little memory.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_one_machine(int(os.environ.get("WORLD_SIZE", ranks)), ranks)
    gpus = torch.cuda.device_count()
    device = int(os.environ.get("LOCAL_RANK", "0")) % gpus
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    share = memory_share(ranks_on(device, ranks, gpus), total, free)
    torch.cuda.set_per_process_memory_fraction(share, device)
    # Megatron uses the GPU whose number is LOCAL_RANK.
    os.environ["LOCAL_RANK"] = str(device)
    register()
    return (
        f"optimus-cc: {ranks} ranks on {gpus} GPU(s), {_gib(share * total)} for each ({NAME}): every message goes "
        "through host memory, so times mean nothing"
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
