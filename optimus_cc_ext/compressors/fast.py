"""Compressors for training on this machine: with Triton's kernels if it has a GPU and Triton, else with torch."""

import importlib.util
from collections.abc import Iterable

import torch

from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.low_rank import FastLowRank, LowRank
from optimus_cc_ext.compressors.numerics import private_generator

__all__ = ["fast_codec", "fast_compressor", "kernels", "use_torch"]


def fast_compressor() -> LowRank:
    """Make a low-rank compressor."""
    if not _triton_applies():
        return FastLowRank()
    from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank

    return TritonLowRank()


def fast_codec(format: str, *, seed: int, rotated: bool) -> Codec:
    """Make a codec of the format of this name.

    Args:
        seed: `--compression-seed`: all ranks rotate blocks by the same signs.
        rotated: whether blocks are rotated, in formats that are.

    Raises:
        ValueError: no format has this name.
    """
    generator = private_generator(seed, "block signs")
    signs = torch.randint(0, 2, (BLOCK,), generator=generator).mul_(2).sub_(1).float() if rotated else None
    if not _triton_applies():
        return Codec(format, signs=signs)
    from optimus_cc_ext.compressors.triton.blocks import TritonCodec

    return TritonCodec(format, signs=signs)


def kernels(
    ranks: Iterable[int], formats: Iterable[str], dtypes: Iterable[torch.dtype], state_dtype: torch.dtype
) -> tuple[str, str | None]:
    """Name what computes here at these compression ranks and in these formats, and why it is not Triton if it could be.

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
    """Let every compressor and codec of this process compute with torch from now on, those that exist already, too."""
    if _triton_applies():
        from optimus_cc_ext.compressors.triton import launches

        launches.AVAILABLE = False


def _triton_applies() -> bool:
    # Not torch.cuda.is_available(), which the CPU runtime answers for itself: and importing Triton takes a while.
    has_gpu = torch.version.cuda is not None and torch._C._cuda_getDeviceCount() > 0
    return has_gpu and importlib.util.find_spec("triton") is not None
