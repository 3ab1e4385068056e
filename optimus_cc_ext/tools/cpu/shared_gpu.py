"""Several ranks on one GPU (`OPTIMUS_CC_DEVICE=shared-gpu`), with real kernels and NCCL.

NCCL refuses two ranks on one GPU only if both say that they are on one host. Each rank here is a host of its own to
NCCL, and its messages go over TCP sockets.
"""

import os
from typing import Literal

import torch

from optimus_cc_ext.errors import OptimusError

NAME = "shared-gpu"
"""Value of OPTIMUS_CC_DEVICE with which ranks share GPUs."""

Device = Literal["cpu", "cuda", "shared-gpu"]
"""Device of all ranks of a run."""

LEAST_BYTES = 3 << 29
"""Fewest free bytes of a GPU for each of its ranks: half a GiB for CUDA and its kernels, and a GiB for a model."""


def device_for(ranks: int, gpus: int) -> Device:
    """Return the device for ranks of one machine: a GPU for each rank, else all GPUs shared, else the CPU."""
    if gpus == 0:
        return "cpu"
    return "cuda" if gpus >= ranks else "shared-gpu"


def activate() -> str:
    """Set this rank's GPU, and make it a host of its own to NCCL; return the line to print at start-up.

    Raises:
        OptimusError: the run has more than one machine, or the GPU too little memory.
    """
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if (world := int(os.environ.get("WORLD_SIZE", ranks))) != ranks:
        raise OptimusError(
            f"OPTIMUS_CC_DEVICE={NAME}: the run has {world} ranks, but only {ranks} of them on this machine, and GPUs "
            "are shared on one machine only. Start all ranks on one machine, or unset the variable if every rank has "
            "a GPU"
        )
    device, beside = int(os.environ.get("RANK", "0")) % gpus, -(-ranks // gpus)
    try:
        torch.cuda.set_device(device)
        free = torch.cuda.mem_get_info(device)[0]
    except RuntimeError as error:
        raise OptimusError(
            f"OPTIMUS_CC_DEVICE={NAME}: GPU {device} takes no further process ({str(error).splitlines()[0]}): use "
            "`nvidia-smi -c DEFAULT` to let it take several, or wait until processes that were killed are gone"
        ) from None
    if free < beside * LEAST_BYTES:
        raise OptimusError(
            f"OPTIMUS_CC_DEVICE={NAME}: {free / 2**30:.1f} GiB of GPU {device} are free, less than "
            f"{LEAST_BYTES / 2**30:.1f} for each of its {beside} ranks: end other processes on the GPU, or start "
            "fewer ranks"
        )
    # Megatron uses the GPU whose number is LOCAL_RANK.
    os.environ |= {"LOCAL_RANK": str(device), "NCCL_HOSTID": f"rank{os.environ.get('RANK', 0)}", "NCCL_IB_DISABLE": "1"}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Only the command that starts all ranks can start CUDA's service and end it again.
    at_once = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    turns = "at the same time" if at_once else "by turns (without MPS), so that times mean little"
    return f"optimus-cc: {ranks} ranks on {gpus} GPU(s) ({NAME}), over NCCL and sockets: they compute {turns}"
