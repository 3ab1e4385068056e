"""Choices that the compiler may be given for the block formats' kernels, other than those in `TritonCodec`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from optimus_cc_ext.compressors.triton import blocks

__all__ = ["VARIANTS", "applied"]

_SIZES = (
    (64, 4, None), (64, 4, 80), (64, 4, 168), (64, 8, None), (32, 2, None), (32, 2, 80), (16, 1, None), (16, 1, 80),
    (128, 8, None), (128, 8, 80),
)  # fmt: skip
"""Blocks that a program works on at a time, its warps, and most registers of a thread (None: the compiler chooses)."""

VARIANTS: Mapping[str, Mapping[str, Any]] = {"ours": {}} | {
    f"{rows} rows, {warps} warps, {registers or 'any'} registers":
        {"ROWS": rows, "num_warps": warps, "maxnreg": registers}
    for rows, warps, registers in _SIZES
}  # fmt: skip


@contextmanager
def applied(chosen: Mapping[str, Any]) -> Iterator[None]:
    """Launch the block kernels with other choices inside of the block."""
    kernels = vars(blocks.block_kernels)
    changed = {name: _Launched(kernels[name], chosen) for name in ("encode_blocks", "add_up_blocks")}
    with (
        patch.object(blocks, "ROWS", chosen.get("ROWS", blocks.ROWS)),
        patch.object(blocks, "block_kernels", SimpleNamespace(**{**kernels, **changed})),
    ):
        yield


@dataclass(frozen=True)
class _Launched:
    kernel: Any
    chosen: Mapping[str, Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **given: self.kernel[grid](*args, **given | self.chosen)
