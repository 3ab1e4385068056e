"""Triton's coder of exact differences, in place of `code` and `restore` in `compressors.exact`: the same messages, to
the bit.

Values are read twice by the sender, which counts the words of all lanes before it packs them, and once by the receiver.
Lanes begin where a prefix sum of their lengths says, no byte is written twice, and there are no atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimus_cc_ext.compressors.exact import sections, steps_of
from optimus_cc_ext.compressors.triton import launches

if launches.AVAILABLE:
    from optimus_cc_ext.compressors.triton import exact_kernels

_WARPS = 2
"""Warps of a program: a thread has one lane."""


def code(before: Tensor, after: Tensor, half: bool, tables: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    lengths, shifts = sections(tables, len(before))
    sums = torch.empty_like(shifts, dtype=torch.int64)
    grid, how = (len(shifts),), {"STEPS": steps_of(len(before)), "HALF": half, "num_warps": _WARPS}
    tables[-4:].zero_()
    exact_kernels.measure[grid](before, after, lengths, shifts, sums, len(before), **how)
    ends = lengths.cumsum(0, dtype=torch.int32)
    exact_kernels.pack[grid](
        before, after, shifts, ends - lengths, ends[-1:], words, len(before), len(words), **how
    )  # fmt: skip
    return sums.sum(), ends[-1]


def restore(patterns: Tensor, half: bool, tables: Tensor, words: Tensor) -> Tensor:
    lengths, shifts = sections(tables, len(patterns))
    first, sums = lengths.cumsum(0, dtype=torch.int32) - lengths, torch.empty_like(shifts, dtype=torch.int64)
    exact_kernels.unpack[(len(shifts),)](
        patterns, shifts, first, words, sums, len(patterns), len(words),
        STEPS=steps_of(len(patterns)), HALF=half, num_warps=_WARPS,
    )  # fmt: skip
    return sums.sum()
