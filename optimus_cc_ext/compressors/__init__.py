"""Mathematics on tensors: low-rank compression of batches of matrices.

Imports torch, never Megatron, never torch.distributed.
"""

from optimus_cc_ext.compressors.factors import initial_factor, next_warm_start, private_generator
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
    "initial_factor",
    "next_warm_start",
    "packed_numel",
    "pays",
    "private_generator",
]
