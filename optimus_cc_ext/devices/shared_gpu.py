"""Several ranks on one GPU (`OPTIMUS_CC_DEVICE=shared-gpu`): real CUDA, collectives through the host.

For proving on one machine, and for CI. Its times mean nothing: every message goes through host memory, and the ranks
take turns on the GPU.
"""

import os
from typing import Literal

import torch

from optimus_cc_ext.devices.staged_gloo import NAME, register
from optimus_cc_ext.errors import OptimusError

__all__ = ["NAME", "Device", "activate", "check_one_machine", "device_for", "is_active", "memory_share", "ranks_on"]

Device = Literal["cpu", "cuda", "shared-gpu"]

CONTEXT_BYTES = 1 << 29
"""What each process takes of a GPU for CUDA itself and the kernels that it loads: half a GiB, outside of its share."""

LEAST_BYTES = 1 << 30
"""A share with less holds no model worth a GPU."""


def is_active() -> bool:
    """Whether this process is asked to share its GPU."""
    return os.environ.get("OPTIMUS_CC_DEVICE") == NAME


def device_for(ranks: int, gpus: int) -> Device:
    """What ranks of one machine can train on: a GPU for each, else all GPUs shared, else the CPU."""
    if gpus == 0:
        return "cpu"
    return "cuda" if gpus >= ranks else "shared-gpu"


def ranks_on(device: int, ranks: int, gpus: int) -> int:
    """How many ranks of this machine are on one of its GPUs: rank r is on GPU r mod `gpus`."""
    return len(range(device, ranks, gpus))


def memory_share(ranks: int, total: int, free: int) -> float:
    """The part of a GPU's memory that each of its ranks may allocate.

    Args:
        ranks: how many share it.
        total, free: bytes of it, and those that nobody uses.

    Raises:
        OptimusError: that would be too little.
    """
    share = total / ranks - CONTEXT_BYTES
    if min(share, free) < LEAST_BYTES:
        raise OptimusError(
            f"OPTIMUS_CC_DEVICE={NAME}: {ranks} ranks on a GPU of {_gib(total)}, {_gib(free)} of it free, leave less "
            f"than {_gib(LEAST_BYTES)} for each: end what else uses the GPU, or start fewer ranks"
        )
    return share / total


def check_one_machine(world_size: int, local_world_size: int) -> None:
    """Raise OptimusError where the run has ranks on other machines."""
    if world_size != local_world_size:
        raise OptimusError(
            f"OPTIMUS_CC_DEVICE={NAME}: {world_size} ranks, and {local_world_size} of them here; it is for proving on "
            "one machine. Start all ranks on one, or unset the variable where every rank has a GPU"
        )


def activate() -> str:
    """Take this rank's GPU and its share of the memory, and let Megatron find both; returns the line to print.

    Raises:
        OptimusError: there is more than one machine, or too little memory.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_one_machine(int(os.environ.get("WORLD_SIZE", ranks)), ranks)
    gpus = torch.cuda.device_count()
    device = int(os.environ.get("LOCAL_RANK", "0")) % gpus
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    share = memory_share(ranks_on(device, ranks, gpus), total, free)
    torch.cuda.set_per_process_memory_fraction(share, device)
    # Megatron takes the GPU of this number.
    os.environ["LOCAL_RANK"] = str(device)
    register()
    return (
        f"optimus-cc: {ranks} ranks on {gpus} GPU(s), {_gib(share * total)} for each ({NAME}): every message goes "
        "through host memory, so times mean nothing"
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
