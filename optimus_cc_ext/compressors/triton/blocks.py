"""Block codec with Triton's kernels for messages that the kernels take: values are read once, and messages written
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec, hadamard
from optimus_cc_ext.compressors.formats import BLOCK, DENSE_ROWS, ROWS
from optimus_cc_ext.compressors.triton import launches
from optimus_cc_ext.compressors.triton.launches import DTYPES, INTERPRETED

if launches.AVAILABLE:
    import triton

    from optimus_cc_ext.compressors.triton import block_kernels

WIDEST = 16
"""Largest number of values that one thread should read at once."""


@dataclass(frozen=True)
class Tables:
    """Tables of a layout on one device, in the form that kernels read: (N, runs, 2), int64."""

    blocks: Tensor
    """Runs of blocks of each message."""

    align: int
    """Power of two that divides all starts and lengths."""

    dense: Tensor
    """Runs of dense values, whose places are offsets in the messages' dense sections."""

    def of(self, which: slice) -> Tables:
        """Return the tables of these messages, in the same memory."""
        return replace(self, blocks=self.blocks[which], dense=self.dense[which])


class TritonCodec(Codec):
    """Codec that uses the kernels for values and messages that they take, and its parent's torch code for others.

    Decoded values are the same with both, to the bit; codes of rotated blocks may differ by one.
    """

    def __init__(self, format: str, *, signs: Tensor | None = None) -> None:
        super().__init__(format, signs=signs)
        self._has_kernels = self.format.packing == "integers"
        self._matrices: dict[tuple[torch.dtype, torch.device, bool], Tensor] = {}

    @torch.no_grad()
    def encode(self, values: Tensor, layout: BlockLayout, out: Tensor, *, skipped: int | None = None) -> None:
        messages = self._by_message(out, layout, values.dtype)
        if not (self._has_kernels and _taken(values, messages)):
            super().encode(values, layout, out, skipped=skipped)
            return
        tables = self._tables_of(layout, values.device)
        # A skipped message that lies between others is encoded all the same: leaving it out would take a second launch.
        ends = {0: slice(1, None), layout.messages - 1: slice(-1)}
        which = ends.get(skipped, slice(None)) if skipped is not None else slice(None)
        dense, scales, codes = (each[which] for each in self._sections(messages, layout, values))
        tables = tables.of(which)
        if tables.dense.numel():
            block_kernels.copy_values[_grid(tables.dense)](
                values, tables.dense, dense, dense.stride(0), ROWS=DENSE_ROWS
            )
        if tables.blocks.numel():
            self._encode_in(values, tables.blocks, scales, codes, tables.align)

    def _encode_in(self, values: Tensor, table: Tensor | None, scales: Tensor, codes: Tensor, align: int) -> None:
        largest = self.format.largest
        assert largest is not None  # formats without a largest code have no kernels
        blocks, per_row = _lengths(values, table)
        block_kernels.encode_blocks[_grid(table, blocks)](
            values, table, self._rotations_in(values.dtype, values.device, back=False), scales, codes,
            scales.stride(0), codes.stride(0), blocks, per_row,
            BITS=self.format.bits, LARGEST=largest, ROTATED=self.rotated,
            INVERSE=1.0 / (largest * self._gain), GAIN=float(self._gain),
            WIDEN=INTERPRETED, ALIGN=align, ROWS=ROWS, num_warps=4,
            maxnreg=128,  # 128 registers let four programs share a multiprocessor, without spilling
        )  # fmt: skip

    @torch.no_grad()
    def decode(self, messages: Tensor, layout: BlockLayout, out: Tensor) -> None:
        messages = self._by_message(messages, layout, out.dtype)
        if self._has_kernels and _taken(out, messages):
            self._add_up(messages, layout, slice(None), 1, out)
        else:
            super().decode(messages, layout, out)

    @torch.no_grad()
    def decode_onto(self, messages: Tensor, layout: BlockLayout, out: Tensor) -> None:
        # Blocks take one kernel and dense values another, whatever the number of messages.
        messages = self._by_message(messages, layout, out.dtype)
        if self._has_kernels and _taken(out, messages):
            self._add_up(messages, layout, slice(None), 1, out, onto=True)
        else:
            super().decode_onto(messages, layout, out)

    @torch.no_grad()
    def decode_add(self, messages: Tensor, layout: BlockLayout, index: int, out: Tensor, *, onto: bool = False) -> None:
        if self._has_kernels and _taken(out, messages):
            self._add_up(messages, layout, slice(index, index + 1), messages.shape[0], out, onto=onto)
        else:
            super().decode_add(messages, layout, index, out, onto=onto)

    def _add_up(
        self, messages: Tensor, layout: BlockLayout, which: slice, senders: int, out: Tensor, *, onto: bool = False
    ) -> None:
        """Decode all messages of one sender, or one message of several senders; `onto`: add the values to those in
        `out`.
        """
        tables, (dense, scales, codes) = self._tables_of(layout, out.device), self._sections(messages, layout, out)
        tables = tables.of(which)
        if tables.dense.numel():
            block_kernels.add_up_values[_grid(tables.dense)](
                dense, tables.dense, out, dense.stride(0), senders, WIDEN=INTERPRETED, ONTO=onto, ROWS=DENSE_ROWS
            )
        if tables.blocks.numel():
            self._decode_in(out, tables.blocks, scales, codes, tables.align, senders, onto=onto)

    def _decode_in(
        self, out: Tensor, table: Tensor | None, scales: Tensor, codes: Tensor, align: int, senders: int = 1,
        *, onto: bool = False,
    ) -> None:  # fmt: skip
        # Sums of four codes are integers below 2^9, which 16 bits hold exactly; sums over senders are not integers.
        dtype = torch.float16 if senders == 1 else torch.float32
        blocks, per_row = _lengths(out, table)
        block_kernels.add_up_blocks[_grid(table, blocks)](
            scales, codes, table, self._rotations_in(dtype, out.device, back=True), out,
            scales.stride(0), codes.stride(0), blocks, per_row, senders,
            BITS=self.format.bits, ROTATED=self.rotated, ALONE=senders == 1,
            WIDEN=INTERPRETED, ONTO=onto, ALIGN=align, ROWS=ROWS, num_warps=4,
        )  # fmt: skip

    @torch.no_grad()
    def encode_rows(self, rows: Tensor) -> Tensor:
        message = rows.new_empty(rows.shape[0], self.row_bytes(rows.shape[1]), dtype=torch.uint8)
        if not (self._has_kernels and _taken(rows, message)):
            return super().encode_rows(rows)
        self._encode_in(rows, None, self._scales_of_rows(rows, message), message, WIDEST)
        return message

    @torch.no_grad()
    def decode_rows(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        in_row = message.shape[1] // self.row_bytes(BLOCK)
        out = message.new_empty(message.shape[0], in_row * BLOCK, dtype=dtype)
        if not (self._has_kernels and _taken(out, message)):
            return super().decode_rows(message, dtype)
        self._decode_in(out, None, self._scales_of_rows(out, message), message, WIDEST)
        return out

    def _scales_of_rows(self, rows: Tensor, message: Tensor) -> Tensor:
        """Return the scales in the message of each row, as int16: a view of (rows, blocks of one row)."""
        return message[:, rows.shape[1] // BLOCK * self.code_bytes :].view(torch.int16)

    def _sections(self, messages: Tensor, layout: BlockLayout, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sections of all messages as 2-D views: dense values, scales as int16, codes."""
        scales, codes, end = layout.sections(self.code_bytes, like.dtype.itemsize)
        return (
            messages[:, : layout.dense_numel * like.dtype.itemsize].view(like.dtype),
            messages[:, scales : scales + 2 * layout.blocks].view(torch.int16),
            messages[:, codes:end],
        )

    def table_bytes(self, layout: BlockLayout, device: torch.device) -> int:
        return layout.table_bytes if self._has_kernels and launches.AVAILABLE and _has_kernels_on(device) else 0

    def _tables_of(self, layout: BlockLayout, device: torch.device) -> Tables:
        if device not in layout.tables:
            if layout.part_of is None:
                layout.tables[device] = _tables(layout, device)
            else:
                whole, index = layout.part_of
                layout.tables[device] = self._tables_of(whole, device).of(slice(index, index + 1))
        tables: Tables = layout.tables[device]
        return tables

    def _rotations_in(self, dtype: torch.dtype, device: torch.device, *, back: bool) -> Tensor | None:
        """Return the matrices by which kernels multiply the quarters of blocks, (4, 32, 32); None without rotation.

        Matrix k has columns 32 k to 32 k + 31 of the first 32 rows of H diag(s), transposed unless `back`. In other
        rows of H the entries are the same, or all have the other sign.
        """
        if self._signs is None:
            return None
        key = dtype, device, back
        if key not in self._matrices:
            rows = hadamard(BLOCK // 4) * self._signs.view(4, 1, -1)
            self._matrices[key] = (rows if back else rows.mT).to(device, dtype).contiguous()
        return self._matrices[key]


def _tables(layout: BlockLayout, device: torch.device) -> Tables:
    coded = [[(piece.start, piece.block, piece.numel) for piece in pieces] for pieces in layout.pieces]
    dense = [
        [(start, end - length, length) for (start, length), end in zip(ranges, _ends(ranges), strict=True)]
        for ranges in layout.dense
    ]
    return Tables(
        blocks=_stacked([[_runs(*each, ROWS, BLOCK) for each in pieces] for pieces in coded], device),
        align=math.gcd(
            WIDEST, *(number for pieces in coded for start, _, numel in pieces for number in (start, numel))
        ),
        dense=_stacked([[_runs(*each, DENSE_ROWS, 1) for each in ranges] for ranges in dense], device),
    )


def _ends(ranges: tuple[tuple[int, int], ...]) -> Iterator[int]:
    return accumulate(length for _, length in ranges)


def _runs(start: int, place: int, numel: int, rows: int, unit: int) -> Tensor:
    """Return the entries, (runs, 2), of `numel` adjacent values, `rows` blocks each; a place is `unit` values."""
    first = torch.arange(0, numel, rows * BLOCK)
    return torch.stack([start + first, (place + first // unit) * 2**14 + (numel - first).clamp_max(rows * BLOCK)], 1)


def _stacked(messages: list[list[Tensor]], device: torch.device) -> Tensor:
    """Stack entries to (N, most runs of a message, 2), padded with zeros."""
    joined = [torch.cat([torch.zeros(0, 2, dtype=torch.int64), *runs]) for runs in messages]
    return torch.nn.utils.rnn.pad_sequence(joined, batch_first=True).to(device)


def _lengths(values: Tensor, table: Tensor | None) -> tuple[int, int]:
    """Return the number of blocks of all rows of `values` and of one row, for kernels without a table."""
    return (values.numel() // BLOCK, values.shape[1] // BLOCK) if table is None else (0, 1)


def _grid(table: Tensor | None, blocks: int = 0) -> tuple[int, int]:
    return (triton.cdiv(blocks, ROWS), 1) if table is None else (table.shape[1], table.shape[0])


def _taken(values: Tensor, messages: Tensor) -> bool:
    """Return whether kernels take these tensors: contiguous fp32, bf16 or fp16."""
    flat = values.is_contiguous() and messages.stride(-1) == 1
    ours = launches.AVAILABLE and _has_kernels_on(values.device)
    return ours and values.dtype in DTYPES and flat and messages.numel() > 0


def _has_kernels_on(device: torch.device) -> bool:
    """Return whether kernels run on a device: on a GPU or (tests) in the interpreter."""
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")
