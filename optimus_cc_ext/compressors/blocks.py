"""Codec of blocks: encodes values in few bits each, for messages between stages and among replicas where low rank costs
loss.

    1. y = H (s x) / 128           random signs, Hadamard matrix of 128 x 128; without rotation y = x
    2. scale = max |y| / largest   rounded to bf16, as it is sent
    3. code = round(y / scale)     to nearest
    4. x' = s H (scale code)

`formats` has the largest code of each format, and the packing of codes. A NaN or Inf makes its block's scale NaN or
Inf, and so reaches every value that is decoded from this block. Decoded values depend on the message alone, to the bit,
and not on the rank that decodes it: products of codes and scales are exact in fp32, and so are a rotation's sums of
codes, which are integers below 2^14.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from optimus_cc_ext.compressors.formats import (
    AT_ONCE,
    BLOCK,
    DENSE_ROWS,
    ROWS,
    RUN_BYTES,
    format_named,
    section_bytes,
)
from optimus_cc_ext.compressors.numerics import fp32_products, keep_in_range
from optimus_cc_ext.compressors.packing import PACKINGS
from optimus_cc_ext.compressors.scratch import Scratch

_AT_ONCE_ON_GPU = 1 << 15
"""Number of blocks that are encoded at once on a GPU: so many that launches cost less than the work that they launch.
"""

MEASURED_PARTS = 32
"""Number of parts of a large tensor whose errors are measured."""

Ranges = Sequence[tuple[int, int]]
"""Ranges of values in a flat tensor, as (start, length)."""


# --- layout: which values become which blocks of which message ---------------------------------------------


def blocks_in(numel: int) -> int:
    """Count the blocks that `numel` adjacent values take; the last block may be a short one."""
    return -(-numel // BLOCK)


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece: adjacent values of a flat tensor, and the blocks of a message that they become."""

    start: int
    """Offset of the first value in the flat tensor."""

    numel: int
    block: int
    """Number of the first block. All blocks of a piece are full but the last one, which may be short."""


class BlockLayout:
    """Layout of N equally long messages. Each message takes encoded blocks, and dense values, from its ranges of a flat
    tensor.

    A message is [dense values | scales, bf16 | codes]. Each section is as long as the longest of all messages needs it,
    so that all messages are equally long and every replica knows every length. No block crosses the end of a range. A
    short block is filled up with zeros, and costs the bytes of a full block.

    Args:
        coded: for each message, (start, length) of encoded values, in elements of the flat tensor.
        dense: for each message, (start, length) of values that are sent uncompressed.
    """

    def __init__(self, coded: Sequence[Ranges], dense: Sequence[Ranges] | None = None) -> None:
        self.pieces = tuple(tuple(_pieces(ranges)) for ranges in coded)
        """Pieces of encoded values, by message."""

        self.dense = tuple(tuple(joined(ranges)) for ranges in dense or [()] * len(coded))
        """Ranges of dense values, by message. Adjacent ranges are joined."""

        self.blocks = max((last.block + blocks_in(last.numel) for *_, last in filter(None, self.pieces)), default=0)
        """Number of blocks in each message. A message with fewer blocks leaves the last ones unused."""

        self.dense_numel = max((sum(length for _, length in ranges) for ranges in self.dense), default=0)
        """Number of dense values in each message. A message with fewer values leaves the last ones unused."""

        self.tables: dict[torch.device, Any] = {}
        """Tables of the kernels, by device: all codecs of the layout share them."""

        self.part_of: tuple[BlockLayout, int] | None = None
        """The layout of which this one has the message of this number at its place, and shares the tables."""

    @classmethod
    def of_one(cls, numel: int) -> "BlockLayout":
        """Lay out one message that encodes a whole flat tensor."""
        return cls([[(0, numel)]])

    def of_message(self, index: int, start: int = 0) -> "BlockLayout":
        """Make the layout of the message `index` alone, padded to the common message length; offsets are relative to
        `start`.
        """
        layout = BlockLayout(())
        layout.pieces = (tuple(Piece(p.start - start, p.numel, p.block) for p in self.pieces[index]),)
        layout.dense = (tuple((at - start, length) for at, length in self.dense[index]),)
        layout.blocks, layout.dense_numel = self.blocks, self.dense_numel
        layout.part_of = None if start else (self, index)
        return layout

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Return few ranges that hold all values of the message `index`: from its first encoded value to its last one,
        and its dense values before and after these.
        """
        pieces, dense = self.pieces[index], self.dense[index]
        first, end = (pieces[0].start, pieces[-1].start + pieces[-1].numel) if pieces else (0, 0)
        return joined([(first, end - first), *(each for each in dense if not first <= each[0] < end)])

    @property
    def messages(self) -> int:
        """Number N of messages in the layout."""
        return len(self.pieces)

    @property
    def table_bytes(self) -> int:
        """Bytes of the kernels' tables, which hold one entry for each program of a kernel."""
        coded = (sum(-(-piece.numel // (ROWS * BLOCK)) for piece in pieces) for pieces in self.pieces)
        dense = (sum(-(-length // (DENSE_ROWS * BLOCK)) for _, length in ranges) for ranges in self.dense)
        return RUN_BYTES * self.messages * (max(coded, default=0) + max(dense, default=0))

    def sections(self, code_bytes: int, itemsize: int) -> tuple[int, int, int]:
        """Return the offsets in a message of this layout, and its length; `section_bytes` explains the arguments."""
        return section_bytes(self.blocks, self.dense_numel, code_bytes, itemsize)


def joined(ranges: Ranges, unit: int = 1) -> list[tuple[int, int]]:
    """Join adjacent ranges, if the first of them has a multiple of `unit` values."""
    found: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if found and sum(found[-1]) == start and found[-1][1] % unit == 0:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def _pieces(ranges: Ranges) -> Iterator[Piece]:
    """Cut ranges into pieces of blocks; adjacent ranges of whole blocks become one piece."""
    block = 0
    for start, numel in joined(ranges, BLOCK):
        yield Piece(start, numel, block)
        block += blocks_in(numel)


# --- messages ----------------------------------------------------------------------------------------------


class Codec:
    """Codec of one format: encodes a flat tensor into messages, and adds up the values of messages; with torch, on any
    device.

    `values` and `out` are flat tensors in bf16, fp16 or fp32, and may be views of a bucket; a message is flat uint8 of
    `message_bytes`. All values of one codec's messages have one dtype. No function is differentiated, and none
    allocates memory once the shapes have been seen; calls must be ordered on one stream.

    Args:
        format: a name of `formats.FORMATS`.
        signs: (128,) of +-1, for formats that are rotated; None: no format is rotated.

    Raises:
        ValueError: there is no format of this name, or its codes cannot be packed.
    """

    def __init__(self, format: str, *, signs: Tensor | None = None) -> None:
        self.format = format_named(format)
        if self.format.block != BLOCK or self.format.packing not in PACKINGS:
            raise ValueError(
                f"{format}: codecs know blocks of {BLOCK} and the packings {', '.join(PACKINGS)}, "
                f"not blocks of {self.format.block}, {self.format.packing}"
            )
        self.code_bytes = self.format.code_bytes

        self._signs = signs if self.format.rotated else None
        self.rotated = self._signs is not None

        self._gain = BLOCK if self.rotated else 1
        """Factor by which the rotation's Hadamard matrix, not normalised, lengthens a block."""

        self._scratch = Scratch()
        self._packing = PACKINGS[self.format.packing](self.format, self._scratch)
        self._rotations: dict[torch.device, Tensor] = {}

    def rotation(self, device: torch.device) -> Tensor:
        """Return the rotation, (128, 128) in fp32: a Hadamard matrix of +-1 whose columns have random signs."""
        if device not in self._rotations:
            assert self._signs is not None
            self._rotations[device] = (hadamard(BLOCK) * self._signs).to(device)
        return self._rotations[device]

    def message_bytes(self, layout: BlockLayout, dtype: torch.dtype) -> int:
        """Return the bytes of each message of `layout` if its dense values have this dtype."""
        return layout.sections(self.code_bytes, dtype.itemsize)[2]

    def table_bytes(self, layout: BlockLayout, device: torch.device) -> int:
        """Return the bytes of memory for tables of `layout` on a device."""
        return 0

    @torch.no_grad()
    def encode(self, values: Tensor, layout: BlockLayout, out: Tensor, *, skipped: int | None = None) -> None:
        """Write all messages of `layout` but `skipped`, which no rank decodes: `values` -> (N, message_bytes)."""
        for index, message in enumerate(self._by_message(out, layout, values.dtype)):
            if index == skipped:
                continue
            dense, scales, codes = self._split(message, layout, values.dtype)
            for (start, length), slot in zip(layout.dense[index], _slots(dense, layout.dense[index]), strict=True):
                slot.copy_(values[start : start + length])
            for piece, blocks in _parts(layout.pieces[index], values.device):
                self._encode_blocks(self._load(values, piece), scales[blocks], codes[blocks])

    @torch.no_grad()
    def decode(self, messages: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """Decode each message of `layout`, (N, message_bytes), into its ranges of `out`."""
        for index, message in enumerate(self._by_message(messages, layout, out.dtype)):
            self.decode_add(message[None], layout, index, out)

    @torch.no_grad()
    def decode_onto(self, messages: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """Decode each message of `layout`, (N, message_bytes), and add its values to its ranges of `out`.

        A value is rounded to the dtype of `out` when it is decoded, and so is its sum with the value in `out`.
        """
        for index, message in enumerate(self._by_message(messages, layout, out.dtype)):
            self.decode_add(message[None], layout, index, out, onto=True)

    @torch.no_grad()
    def decode_add(self, messages: Tensor, layout: BlockLayout, index: int, out: Tensor, *, onto: bool = False) -> None:
        """Write the sum of R senders' messages `index`, (R, message_bytes), into the message's ranges of `out`.

        The sum is computed in fp32, in the order of the senders, and rounded once, to the dtype of `out`.

        Args:
            onto: add the sum to the values in `out`, instead of replacing them.
        """
        split = [self._split(message, layout, out.dtype) for message in messages if messages.numel()]
        dense = [_slots(message[0], layout.dense[index]) for message in split]
        for (start, length), slots in zip(layout.dense[index], zip(*dense, strict=True), strict=True):
            if onto and not slots[1:]:
                out[start : start + length].add_(slots[0])  # in the dtype of `out` already
                continue
            total = self._scratch.take("total", (length,), torch.float32, out.device).copy_(slots[0])
            for slot in slots[1:]:
                total.add_(slot)
            self._put(out[start : start + length], total, onto)
        for piece, blocks in _parts(layout.pieces[index], out.device):
            total = self._sum_blocks([(scales[blocks], codes[blocks]) for _, scales, codes in split], out.dtype)
            self._put(out[piece.start : piece.start + piece.numel], total.view(-1)[: piece.numel], onto)

    def _put(self, out: Tensor, total: Tensor, onto: bool) -> None:
        """Round `total`, in fp32, to the dtype of `out`, and write it to `out`, or with `onto` add it to `out`."""
        if not onto:
            out.copy_(total)
        elif out.dtype == torch.float32:
            out.add_(total)
        else:
            out.add_(self._scratch.take("rounded", tuple(total.shape), out.dtype, out.device).copy_(total))

    @torch.no_grad()
    def errors(
        self,
        values: Tensor,
        layout: BlockLayout,
        messages: Tensor,
        note: Callable[[Tensor, Tensor, Scratch], None],
        *,
        skipped: int | None = None,
    ) -> None:
        """Call `note(values, error, scratch)`, flat in fp32, for encoded values, some blocks at a time (for metrics).

        Of more than `MEASURED_PARTS` such parts, a sample that depends on their number alone: each part takes about 25
        operators, which a GPU with hundreds of them would wait for in every measured iteration.

        Args:
            skipped: index of the message that no rank decodes, so that its errors do not count.
        """
        by_message = self._by_message(messages, layout, values.dtype)
        pieces = layout.pieces[: len(by_message)]
        parts = [
            (index, part)
            for index, of_message in enumerate(pieces)
            if index != skipped
            for part in _parts(of_message, values.device)
        ]
        if len(parts) > MEASURED_PARTS:
            parts = Random(len(parts)).sample(parts, MEASURED_PARTS)
        for index, (piece, blocks) in parts:
            _, scales, codes = self._split(by_message[index], layout, values.dtype)
            decoded = self._sum_blocks([(scales[blocks], codes[blocks])], values.dtype)
            sent = self._load(values, piece)
            # Errors leave out the zeros that fill up a short block: once rotated, these have errors that no rank
            # receives.
            error = torch.sub(sent, decoded, out=decoded)
            note(sent.view(-1)[: piece.numel], error.view(-1)[: piece.numel], self._scratch)

    # -- rows: one message for each row of a matrix, from its shape alone ---------------------------------------

    def row_bytes(self, width: int) -> int:
        """Return the bytes of an encoded row of `width` values, [codes | scales, bf16].

        Raises:
            ValueError: the width is not a multiple of a block's values.
        """
        if width % BLOCK:
            raise ValueError(f"a row of {width} values does not divide into blocks of {BLOCK}")
        return width // BLOCK * (self.code_bytes + 2)

    @torch.no_grad()
    def encode_rows(self, rows: Tensor) -> Tensor:
        """Encode each row of `rows`, (n, width) and contiguous, by itself; return (n, row_bytes) in uint8. n may be 0.

        Memory comes from torch's allocator, because the number of rows changes from call to call.
        """
        n, numel = rows.shape[0], rows.numel()
        scales = rows.new_empty(numel // BLOCK, dtype=torch.bfloat16)
        codes = rows.new_empty(numel // BLOCK, self.code_bytes, dtype=torch.uint8)
        for part, blocks in _parts((Piece(0, numel, 0),), rows.device):
            self._encode_blocks(self._load(rows.view(-1), part), scales[blocks], codes[blocks])
        scale_bytes = rows.shape[1] // BLOCK * 2
        widths = (self.row_bytes(rows.shape[1]) - scale_bytes, scale_bytes)
        return torch.cat(
            [part.view(n, w) for part, w in zip((codes, scales.view(torch.uint8)), widths, strict=True)], 1
        )

    @torch.no_grad()
    def decode_rows(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode (n, row_bytes), as `encode_rows` has encoded it: (n, width) in `dtype`."""
        in_row = message.shape[1] // (self.code_bytes + 2)
        out = message.new_empty(message.shape[0], in_row * BLOCK, dtype=dtype)
        codes = message[:, : in_row * self.code_bytes].reshape(-1, self.code_bytes).contiguous()
        scales = message[:, in_row * self.code_bytes :].reshape(-1).contiguous().view(torch.bfloat16)
        for part, blocks in _parts((Piece(0, out.numel(), 0),), out.device):
            values = self._sum_blocks([(scales[blocks], codes[blocks])], dtype)
            out.view(-1)[part.start : part.start + part.numel].copy_(values.view(-1))
        return out

    # -- parts of messages --------------------------------------------------------------------------------------

    def _by_message(self, messages: Tensor, layout: BlockLayout, dtype: torch.dtype) -> Tensor:
        """Return messages as (N, message_bytes); none if they are empty. Raises ValueError if the size does not fit."""
        nbytes = self.message_bytes(layout, dtype)
        if messages.numel() != layout.messages * nbytes:
            raise ValueError(f"{layout.messages} messages of {nbytes} bytes do not fit into {tuple(messages.shape)}")
        return messages.view(layout.messages if nbytes else 0, nbytes)

    def _split(self, message: Tensor, layout: BlockLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of one message: dense values, scales (blocks,) and codes (blocks, code_bytes)."""
        scales, codes, _ = layout.sections(self.code_bytes, dtype.itemsize)
        return (
            message[: layout.dense_numel * dtype.itemsize].view(dtype),
            message[scales : scales + 2 * layout.blocks].view(torch.bfloat16),
            message[codes : codes + layout.blocks * self.code_bytes].view(layout.blocks, self.code_bytes),
        )

    def _load(self, values: Tensor, piece: Piece) -> Tensor:
        """Load a piece as (blocks, 128) in fp32, filled up with zeros."""
        blocks = -(-piece.numel // BLOCK)
        loaded = self._scratch.take("loaded", (blocks, BLOCK), torch.float32, values.device).view(-1)
        loaded[: piece.numel].copy_(values[piece.start : piece.start + piece.numel])
        loaded[piece.numel :].zero_()
        return loaded.view(blocks, BLOCK)

    def _encode_blocks(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Encode X (b, 128), fp32, into scales and codes. X is overwritten."""
        largest = self.format.largest
        if largest is None:
            scales.fill_(1.0)
            self._packing.write(x, codes)
            return
        y, spare = x, self._scratch.take("rotated", x.shape, torch.float32, x.device)
        if self.rotated:
            with fp32_products():
                y, spare = torch.mm(x, self.rotation(x.device).T, out=spare), x
        # The absolute values take a pass of their own, because torch's norm of each row costs as much as the rotation.
        peak = self._scratch.take("scale", (x.shape[0], 1), torch.float32, x.device)
        torch.amax(torch.abs(y, out=spare), 1, keepdim=True, out=peak)
        # Values are multiplied by the scale's inverse, because torch divides differently on a GPU.
        scales.copy_(peak.mul_(1.0 / (largest * self._gain)).view(-1))
        # Values are divided by the scale as it is sent, in bf16. A quotient by 0 or infinity is 0 or NaN; no code holds
        # NaN.
        y.div_(peak.copy_(scales.view(-1, 1)).mul_(self._gain))
        self._packing.write(y.clamp_(-largest, largest).nan_to_num_(0.0), codes)

    def _sum_blocks(self, parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
        """Decode blocks of some senders, of values in `dtype`, and add them up: (b, 128) in fp32, in scratch memory."""
        (scales, codes), *others = parts
        total = self.numbers(codes)
        if self.rotated and not others:
            # The scale is applied after the rotation's sums: in whatever precision the product runs, it is exact for
            # such integers.
            total = self._rotated_back(total)
        total.mul_(scale := self._scale(scales))
        if dtype == torch.float16 and not others and self.format.largest is not None:
            # The sum of several senders may leave the range, as without compression, so that a loss scaler sees it.
            keep_in_range(total, scale, dtype)
        for scales, codes in others:
            total.addcmul_(self.numbers(codes, "addend"), self._scale(scales))
        return self._rotated_back(total) if self.rotated and others else total

    def _rotated_back(self, x: Tensor) -> Tensor:
        with fp32_products():
            spare = self._scratch.take("rotated", x.shape, torch.float32, x.device)
            return torch.mm(x, self.rotation(x.device), out=spare)

    def numbers(self, codes: Tensor, name: str = "total") -> Tensor:
        """Return the numbers that codes (b, code_bytes) stand for: (b, 128) in fp32, in the scratch tensor `name`."""
        out = self._scratch.take(name, (codes.shape[0], BLOCK), torch.float32, codes.device)
        self._packing.read(codes, out)
        return out

    def _scale(self, scales: Tensor) -> Tensor:
        """Return scales as (b, 1) in fp32."""
        return self._scratch.take("scale", (scales.shape[0], 1), torch.float32, scales.device).copy_(scales.view(-1, 1))


def hadamard(size: int) -> Tensor:
    """Make Sylvester's Hadamard matrix, (size, size), of entries +-1; size is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _parts(pieces: tuple[Piece, ...], device: torch.device) -> Iterator[tuple[Piece, slice]]:
    """Cut pieces into parts of at most `AT_ONCE` blocks. Yield each part, and the slice of its block numbers."""
    most = AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_GPU
    for piece in pieces:
        for done in range(0, piece.numel, most * BLOCK):
            numel = min(piece.numel - done, most * BLOCK)
            block = piece.block + done // BLOCK
            yield Piece(piece.start + done, numel, block), slice(block, block - (-numel // BLOCK))


def _slots(section: Tensor, ranges: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
    """Split a message's dense section into one part for each range of dense values."""
    lengths = [length for _, length in ranges]
    return section[: sum(lengths)].split(lengths)
