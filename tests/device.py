"""Device of the ranks of a test session: the CPU; in a smoke test of one version of Megatron, GPUs if there are any.

It is chosen once, when pytest starts, because a server that will be forked must not initialise CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from optimus_cc_ext.tools.cpu.shared_gpu import Device, device_for

__all__ = ["RANKS", "VARIABLE", "device_of", "said_of", "take"]

VARIABLE = "OPTIMUS_CC_TEST_DEVICE"
"""Environment variable that holds the chosen device."""

RANKS = 4
"""Number of ranks of the smoke test's runs."""


def device_of(environment: Mapping[str, str], gpus: int) -> Device:
    """Choose the device by pytest's environment and the number of visible GPUs."""
    if "OPTIMUS_CC_TEST_MEGATRON" not in environment or environment.get("OPTIMUS_CC_DEVICE") == "cpu":
        return "cpu"
    return device_for(RANKS, gpus)


def said_of(device: Device, gpus: int) -> list[str]:
    """Return the lines about the device that pytest prints above the tests."""
    if device == "cpu":
        return []
    return [f"{RANKS} ranks train on {gpus} GPU(s) ({device}); OPTIMUS_CC_DEVICE=cpu keeps them on the CPU"]


def take() -> None:
    """Set the GPU of a rank that was just forked, if it has one."""
    device = os.environ["OPTIMUS_CC_DEVICE"]
    if device != "cpu":
        from optimus_cc_ext.tools.cpu import cpu_runtime

        cpu_runtime.activate()
