"""Mathematics on tensors: low-rank compression of batches of matrices, and blocks of values in few bits.

Imports torch, never Megatron, never torch.distributed.
"""

import importlib.util
from collections.abc import Iterable

import torch

from optimus_cc_ext.compressors.block_codec import BlockCodec, BlockFormat, Codec, block_format
from optimus_cc_ext.compressors.block_layout import BLOCK, BlockLayout
from optimus_cc_ext.compressors.factors import initial_q, next_warm_start, next_warm_starts, private_generator
from optimus_cc_ext.compressors.low_rank import FastLowRank, LowRank
from optimus_cc_ext.compressors.policy import effective_rank, packed_numel, pays
from optimus_cc_ext.compressors.reference import ReferenceLowRank
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.compressors.wire import PackedFactors

__all__ = [
    "BLOCK",
    "BlockCodec",
    "BlockFormat",
    "BlockLayout",
    "Codec",
    "FastLowRank",
    "LowRank",
    "PackedFactors",
    "ReferenceLowRank",
    "Scratch",
    "block_format",
    "effective_rank",
    "fast_codec",
    "fast_compressor",
    "initial_q",
    "kernels",
    "next_warm_start",
    "next_warm_starts",
    "packed_numel",
    "pays",
    "private_generator",
    "use_torch",
]


def fast_compressor() -> LowRank:
    """What training uses on this machine: with Triton's kernels where there is a GPU, and Triton for it."""
    if not _triton_applies():
        return FastLowRank()
    from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank

    return TritonLowRank()


def fast_codec(format: BlockFormat, *, seed: int, rotated: bool, exact: bool = False) -> Codec:
    """What training encodes with on this machine.

    Args:
        seed: `--compression-seed`: all ranks rotate blocks by the same signs.
        rotated: whether int8 and int4 rotate them.
        exact: send values as they are, in the same messages (tests).
    """
    generator = private_generator(seed, "block signs")
    signs = torch.randint(0, 2, (BLOCK,), generator=generator).mul_(2).sub_(1).float()
    if exact or not _triton_applies():
        return BlockCodec("exact" if exact else format, signs=signs if rotated else None)
    from optimus_cc_ext.compressors.triton.blocks import TritonBlockCodec

    return TritonBlockCodec(format, signs=signs if rotated else None)


def kernels(
    ranks: Iterable[int], formats: Iterable[BlockFormat], dtypes: Iterable[torch.dtype], state_dtype: torch.dtype
) -> tuple[str, str | None]:
    """What computes here at these compression ranks and in these formats, and why it is not Triton where it could be.

    Compiles and runs each kernel once where there is a GPU; waits for it. `dtypes` and `state_dtype`: see
    `triton.trial.failure`.
    """
    if not _triton_applies():
        return "torch", None
    from optimus_cc_ext.compressors.triton import launches, trial

    failure = trial.failure(ranks, formats, torch.device("cuda", torch.cuda.current_device()), dtypes, state_dtype)
    if failure is not None or not launches.AVAILABLE:
        return "torch", failure
    return f"triton {launches.triton.__version__}", None


def use_torch() -> None:
    """From now on every compressor and codec of this process computes with torch, those that exist already, too."""
    if _triton_applies():
        from optimus_cc_ext.compressors.triton import launches

        launches.AVAILABLE = False


def _triton_applies() -> bool:
    # Not torch.cuda.is_available(), which the CPU runtime answers for itself: and importing Triton takes a while.
    has_gpu = torch.version.cuda is not None and torch._C._cuda_getDeviceCount() > 0
    return has_gpu and importlib.util.find_spec("triton") is not None
