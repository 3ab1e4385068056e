"""Choices that the compiler may be given for the block formats' kernels, other than those in `TritonCodec`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from optimus_cc_ext.compressors.triton import blocks

__all__ = ["VARIANTS", "applied"]


@dataclass(frozen=True)
class Variant:
    """Blocks that a program works on at a time, warps of a program, most registers of a thread (None: as many as the
    compiler likes), and stages of a loop's pipeline.
    """

    rows: int
    warps: int
    registers: int | None = None
    stages: int = 3

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.warps} warps, {self.registers or 'any'} registers, {self.stages} stages"


VARIANTS: Mapping[str, Variant | None] = {"ours": None} | {
    str(each): each
    for each in (
        Variant(64, 4), Variant(64, 4, 80), Variant(64, 4, 168), Variant(64, 4, stages=1), Variant(64, 8),
        Variant(32, 2), Variant(32, 2, 80), Variant(16, 1), Variant(16, 1, 80), Variant(128, 8), Variant(128, 8, 80),
    )
}  # fmt: skip


@contextmanager
def applied(variant: Variant | None) -> Iterator[None]:
    """Launch the block kernels with other choices inside of the block; None: as they are."""
    if variant is None:
        yield
        return
    chosen = {
        "ROWS": variant.rows, "num_warps": variant.warps, "maxnreg": variant.registers, "num_stages": variant.stages,
    }  # fmt: skip
    kernels = {**vars(blocks.block_kernels)}
    changed = {name: _Launched(kernels[name], chosen) for name in ("encode_blocks", "add_up_blocks")}
    with (
        patch.object(blocks, "ROWS", variant.rows),
        patch.object(blocks, "block_kernels", SimpleNamespace(**kernels | changed)),
    ):
        yield


@dataclass(frozen=True)
class _Launched:
    """Kernel whose launches have other choices."""

    kernel: Any
    chosen: Mapping[str, Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **given: self.kernel[grid](*args, **given | self.chosen)
