"""Mathematics on tensors: low-rank compression of batches of matrices.

Imports torch, never Megatron, never torch.distributed.
"""

import importlib.util

import torch

from optimus_cc_ext.compressors.factors import initial_q, next_warm_start, private_generator
from optimus_cc_ext.compressors.low_rank import FastLowRank, LowRank
from optimus_cc_ext.compressors.policy import effective_rank, packed_numel, pays
from optimus_cc_ext.compressors.reference import ReferenceLowRank
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.compressors.wire import PackedFactors

__all__ = [
    "FastLowRank",
    "LowRank",
    "PackedFactors",
    "ReferenceLowRank",
    "Scratch",
    "effective_rank",
    "fast_compressor",
    "initial_q",
    "next_warm_start",
    "packed_numel",
    "pays",
    "private_generator",
]


def fast_compressor() -> LowRank:
    """What training uses on this machine: with Triton's kernels where there is a GPU, and Triton for it."""
    # Not torch.cuda.is_available(), which the CPU runtime answers for itself: and importing Triton takes a while.
    if torch.version.cuda is None or not torch._C._cuda_getDeviceCount() or importlib.util.find_spec("triton") is None:
        return FastLowRank()
    from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank

    return TritonLowRank()
