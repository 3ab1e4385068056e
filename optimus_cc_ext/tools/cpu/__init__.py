"""Devices of ranks that have no GPU of their own: a CPU with gloo in CUDA's place, or a part of a shared GPU.

Imports Megatron only inside functions, once torch is prepared. `cpu_runtime.activate` chooses
the device: start reading there.
"""
