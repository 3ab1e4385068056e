"""Block codec with Triton's kernels for messages that the kernels take: values are read once, and messages written
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec, hadamard
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.triton import launches
from optimus_cc_ext.compressors.triton.launches import DTYPES, INTERPRETED

if launches.AVAILABLE:
    import triton

    from optimus_cc_ext.compressors.triton import block_kernels

ROWS = 64
"""Number of blocks that one program works on at a time: the rows that Hopper's and Blackwell's tensor cores multiply at
once, and as many as fit the registers.
"""

DENSE_ROWS = 16
"""Number of runs of 128 dense values that one program works on at a time."""

WIDEST = 16
"""Largest number of values that one thread should read at once."""


@dataclass(frozen=True)
class Tables:
    """Tables of a layout on one device, in the form that kernels read; int64."""

    blocks: Tensor
    """Entry start * 256 + length of each block, (N, blocks); 0 if a message has no such block."""

    align: int
    """Power of two that divides all starts and lengths."""

    chunks: Tensor
    """Entries of dense values, (N, chunks), in the same form as `blocks`, at most 128 values each."""

    slots: Tensor
    """Offsets of the chunks in the messages' dense sections, (N, chunks)."""


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
        chunks, blocks = tables.chunks[which], tables.blocks[which]
        if chunks.numel():
            block_kernels.copy_values[_grid(chunks, chunks.shape[1], DENSE_ROWS)](
                values, chunks, tables.slots[which], dense, dense.stride(0), chunks.shape[1], ROWS=DENSE_ROWS
            )
        if blocks.numel():
            self._encode_in(values, blocks, scales, codes, tables.align)

    def _encode_in(self, values: Tensor, table: Tensor | None, scales: Tensor, codes: Tensor, align: int) -> None:
        largest = self.format.largest
        assert largest is not None  # formats without a largest code have no kernels
        blocks, per_row = _lengths(values, table)
        block_kernels.encode_blocks[_grid(table, blocks, ROWS)](
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
        if tables.chunks.numel():
            chunks = tables.chunks[which]
            block_kernels.add_up_values[_grid(chunks, chunks.shape[1], DENSE_ROWS)](
                dense, chunks, tables.slots[which], out, dense.stride(0), chunks.shape[1], senders,
                WIDEN=INTERPRETED, ONTO=onto, ROWS=DENSE_ROWS,
            )  # fmt: skip
        if tables.blocks.numel():
            blocks = tables.blocks[which]
            self._decode_in(out, blocks, scales, codes, tables.align, senders, onto=onto)

    def _decode_in(
        self, out: Tensor, table: Tensor | None, scales: Tensor, codes: Tensor, align: int, senders: int = 1,
        *, onto: bool = False,
    ) -> None:  # fmt: skip
        # Sums of four codes are integers below 2^9, which 16 bits hold exactly; sums over senders are not integers.
        dtype = torch.float16 if senders == 1 else torch.float32
        blocks, per_row = _lengths(out, table)
        block_kernels.add_up_blocks[_grid(table, blocks, ROWS)](
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

    def _tables_of(self, layout: BlockLayout, device: torch.device) -> Tables:
        if device not in layout.tables:
            layout.tables[device] = _tables(layout, device)
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
    coded = [[(piece.start, piece.numel) for piece in pieces] for pieces in layout.pieces]
    slots: list[list[Tensor]] = [[] for _ in layout.dense]
    for places, ranges in zip(slots, layout.dense, strict=True):
        taken = 0
        for _, length in ranges:
            places.append(torch.arange(taken, taken + length, BLOCK))
            taken += length
    return Tables(
        blocks=_stacked([[_entries(*span) for span in ranges] for ranges in coded], device),
        align=math.gcd(WIDEST, *(number for ranges in coded for span in ranges for number in span)),
        chunks=_stacked([[_entries(*span) for span in ranges] for ranges in layout.dense], device),
        slots=_stacked(slots, device),
    )


def _entries(start: int, numel: int) -> Tensor:
    """Return the entries of a run of values, 128 values at a time."""
    starts = torch.arange(start, start + numel, BLOCK)
    return starts * 256 + (start + numel - starts).clamp_max(BLOCK)


def _stacked(rows: list[list[Tensor]], device: torch.device) -> Tensor:
    """Stack rows to (N, length of the longest row), padded with zeros."""
    joined = [torch.cat([torch.arange(0), *parts]) for parts in rows]
    return torch.nn.utils.rnn.pad_sequence(joined, batch_first=True).to(device)


def _lengths(values: Tensor, table: Tensor | None) -> tuple[int, int]:
    """Return the number of blocks of a message, from the table that kernels index with it, and 1; without a table, the
    blocks of all rows of `values` and of one row.
    """
    return (values.numel() // BLOCK, values.shape[1] // BLOCK) if table is None else (table.shape[1], 1)


def _grid(table: Tensor | None, blocks: int, rows: int) -> tuple[int, int]:
    return triton.cdiv(blocks, rows), 1 if table is None else table.shape[0]


def _taken(values: Tensor, messages: Tensor) -> bool:
    """Return whether kernels take these tensors: contiguous fp32, bf16 or fp16, on a GPU or (tests) in the
    interpreter.
    """
    on_device = values.device.type == "cuda" or (INTERPRETED and values.device.type == "cpu")
    flat = values.is_contiguous() and messages.stride(-1) == 1
    return launches.AVAILABLE and on_device and values.dtype in DTYPES and flat and messages.numel() > 0
