"""Compressors for training on this machine: with Triton's kernels if it has a GPU and Triton, else with torch."""

import importlib.util
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.low_rank import FastLowRank, LowRank
from optimus_cc_ext.compressors.numerics import private_generator


def fast_compressor() -> LowRank:
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


def exact_kernels() -> ModuleType | None:
    """Return the module whose kernels code exact differences on a GPU, or None."""
    if not _triton_applies():
        return None
    from optimus_cc_ext.compressors.triton import exact, launches

    return exact if launches.AVAILABLE else None


def copy_unless(finite: torch.Tensor, before: torch.Tensor, out: torch.Tensor) -> None:
    """Copy `before` onto `out`, both contiguous, if `finite`, a 0-dim bool tensor, is False.

    The device decides: the host would have to wait for it. With Triton's kernel, nothing is read or written if
    `finite` is True; torch reads both tensors, and writes one, in either case.
    """
    if finite.device.type == "cpu":  # the host reads its own memory without waiting
        if not finite.numpy():
            out.copy_(before)
        return
    if _triton_applies():
        from optimus_cc_ext.compressors.triton import launches

        if launches.takes_factors(out, 1) and out.dim() == 3:
            launches.copy_unless(finite, before, out)
            return
    torch.where(finite, out, before, out=out)


@dataclass(frozen=True, kw_only=True)
class Needed:
    """The variants of kernels that a run launches."""

    ranks: Sequence[int]
    """Compression ranks of low-rank messages and gradients."""

    formats: Sequence[str]
    """Names of the block formats that the run uses; `EXACT` is among them if it uses exact messages."""

    dtypes: Collection[torch.dtype]
    """Dtypes of the run's messages and gradients."""

    state_dtype: torch.dtype = torch.float32

    rotated: bool = True
    """True if blocks are rotated in the formats that allow it."""

    align: int = 1
    """A number that divides the starts and lengths of all ranges of encoded values."""

    row_width: int = 0
    """Values of a row that is a message of its own; 0: there are no such messages."""


def kernels(needed: Needed) -> tuple[str, str | None]:
    """Return the library that compresses on this machine, and why it is not Triton. The reason is None without a GPU.

    Compiles and runs each variant of the kernels once. One rank of a node compiles first. If a variant fails, all are
    tried again in a fresh folder.
    """
    if not _has_gpu():
        return "torch", None
    from optimus_cc_ext.compressors.triton import cache, launches

    failure = launches.lacking()
    if failure is None:
        from optimus_cc_ext.compressors.triton import trial
        from optimus_cc_ext.compressors.triton.blocks import WIDEST

        device = torch.device("cuda", torch.cuda.current_device())
        aligns = [align for align in (1, 2, 4, 8, WIDEST) if align % math.gcd(needed.align, WIDEST) == 0]
        failure = cache.twice(
            lambda: trial.failure(
                needed.ranks,
                needed.formats,
                device,
                needed.dtypes,
                needed.state_dtype,
                [needed.rotated],
                aligns,
                needed.row_width,
            )
        )
    return ("torch", failure) if failure is not None else (f"triton {launches.triton.__version__}", None)


def use_torch() -> None:
    """Let every compressor and codec of this process compute with torch from now on, those that exist already, too."""
    if _triton_applies():
        from optimus_cc_ext.compressors.triton import launches

        launches.AVAILABLE = False


def _triton_applies() -> bool:
    return _has_gpu() and importlib.util.find_spec("triton") is not None


def _has_gpu() -> bool:
    # The CPU runtime replaces torch.cuda.is_available(), so this function reads for which device PyTorch was built.
    return torch.version.cuda is not None and torch._C._cuda_getDeviceCount() > 0
