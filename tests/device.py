"""What the ranks of a run of tests train on: the CPU; in a smoke test of one version of Megatron, GPUs where there are.

It is decided once, where pytest starts, for a server that is to be forked must not ask CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from optimus_cc_ext.devices.shared_gpu import Device, device_for

__all__ = ["RANKS", "VARIABLE", "device_of", "said_of", "take"]

VARIABLE = "OPTIMUS_CC_TEST_DEVICE"
"""What was decided."""

RANKS = 4
"""Of the smoke test's runs."""


def device_of(environment: Mapping[str, str], gpus: int) -> Device:
    """By the environment of pytest, and the GPUs that are visible."""
    if "OPTIMUS_CC_TEST_MEGATRON" not in environment or environment.get("OPTIMUS_CC_DEVICE") == "cpu":
        return "cpu"
    return device_for(RANKS, gpus)


def said_of(device: Device, gpus: int) -> list[str]:
    """What pytest says of it above the tests."""
    if device == "cpu":
        return []
    return [f"{RANKS} ranks train on {gpus} GPU(s) ({device}); OPTIMUS_CC_DEVICE=cpu keeps them on the CPU"]


def take() -> None:
    """In a rank that was just forked: its GPU, if it is to have one."""
    device = os.environ["OPTIMUS_CC_DEVICE"]
    if device != "cpu":
        from optimus_cc_ext.devices import cpu_runtime

        cpu_runtime.activate()
    if device == "shared-gpu":
        from tests.megatron import interventions

        interventions.over_the_shared_gpus_backend()  # also without Optimus-CC
