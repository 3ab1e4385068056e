"""Blocks of values in a few bits each: what travels between stages and among replicas where low rank costs loss.

    1. y = H (s x) / 128           random signs, Hadamard matrix of 128 x 128; without rotation y = x
    2. scale = max |y| / largest   rounded to bf16, as it travels
    3. code = round(y / scale)     to nearest
    4. x' = s H (scale code)

int8 has codes to +-127, int4 to +-7: all 16 levels are worse (SDP4Bit, Jia et al. 2024, section 3). fp8 is E4M3, whose
largest is 448. A NaN or Inf makes its block's scale NaN or Inf, and so reaches every value that is decoded from it.
What is decoded depends on the message alone, to the bit, and not on who decodes it: products of codes and scales are
exact in fp32, and so are the sums that a rotation makes of codes, which are integers below 2^14.
"""

import typing
from collections.abc import Callable, Iterator
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from optimus_cc_ext.compressors.block_layout import BLOCK, BlockLayout, Piece
from optimus_cc_ext.compressors.precision import fp32_products
from optimus_cc_ext.compressors.scratch import Scratch

__all__ = ["BlockCodec", "BlockFormat", "Codec", "block_format"]

BlockFormat = Literal["int8", "int4", "fp8"]


def block_format(chosen: str) -> BlockFormat | None:
    """A format's name, if it is one of blocks."""
    return cast(BlockFormat, chosen) if chosen in typing.get_args(BlockFormat) else None


LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest code."""

_CODE_BYTES = {"int8": BLOCK, "int4": BLOCK // 2, "fp8": BLOCK, "exact": 4 * BLOCK}
_AT_ONCE, _AT_ONCE_ON_GPU = 1 << 11, 1 << 15
"""Blocks that are encoded at once: 1 MiB in fp32, which is still in a CPU's cache when the next pass reads it; on a GPU
so many that launches cost less than what they launch."""


class Codec(Protocol):
    """Encodes a flat tensor into messages, and adds up what messages hold.

    `values` and `out` are flat tensors, bf16, fp16 or fp32, and may be views of a bucket; a message is flat uint8 of
    `message_bytes`. All values of one codec's messages have one dtype. Nothing is differentiated, and nothing is
    allocated once the shapes have been seen; calls must be ordered on one stream.
    """

    def message_bytes(self, layout: BlockLayout, dtype: torch.dtype) -> int:
        """Bytes of each message of values of this dtype."""
        ...

    def encode(self, values: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """Write all messages of `layout`: `values` -> (N, message_bytes)."""
        ...

    def decode(self, messages: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """Write what each of the messages of `layout`, (N, message_bytes), holds to its place in `out`."""
        ...

    def decode_add(self, messages: Tensor, layout: BlockLayout, index: int, out: Tensor) -> None:
        """Write the sum of what R senders sent as message `index`, (R, message_bytes), to its place in `out`.

        In fp32, in the order of the senders; rounded once, to the dtype of `out`.
        """
        ...

    def errors(
        self, values: Tensor, layout: BlockLayout, messages: Tensor, note: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Call `note(values, error)`, both flat in fp32, for all that is encoded, some blocks at a time (metrics)."""
        ...


class BlockCodec:
    """A format as torch does it, on any device; see above.

    Args:
        format: "exact" sends fp32 values through the same messages (tests).
        signs: (128,) of +-1; None: nothing is rotated.
    """

    def __init__(self, format: BlockFormat | Literal["exact"], *, signs: Tensor | None = None) -> None:
        self.format = format
        self.code_bytes = _CODE_BYTES[format]
        self._scratch = Scratch()
        self._signs = signs if format in ("int8", "int4") else None
        self._rotations: dict[torch.device, Tensor] = {}

    @property
    def rotated(self) -> bool:
        """Whether blocks are rotated."""
        return self._signs is not None

    def rotation(self, device: torch.device) -> Tensor:
        """H diag(s), (128, 128), fp32, of entries +-1."""
        if device not in self._rotations:
            assert self._signs is not None
            self._rotations[device] = (hadamard(BLOCK) * self._signs).to(device)
        return self._rotations[device]

    def message_bytes(self, layout: BlockLayout, dtype: torch.dtype) -> int:
        """See `Codec`."""
        return layout.sections(self.code_bytes, dtype.itemsize)[2]

    @torch.no_grad()
    def encode(self, values: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """See `Codec`."""
        for index, message in enumerate(self._by_message(out, layout, values.dtype)):
            dense, scales, codes = self._split(message, layout, values.dtype)
            for (start, length), slot in zip(layout.dense[index], _slots(dense, layout.dense[index]), strict=True):
                slot.copy_(values[start : start + length])
            for piece, blocks in _parts(layout.pieces[index], values.device):
                self._encode_blocks(self._load(values, piece), scales[blocks], codes[blocks])

    @torch.no_grad()
    def decode(self, messages: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """See `Codec`."""
        for index, message in enumerate(self._by_message(messages, layout, out.dtype)):
            self.decode_add(message[None], layout, index, out)

    @torch.no_grad()
    def decode_add(self, messages: Tensor, layout: BlockLayout, index: int, out: Tensor) -> None:
        """See `Codec`."""
        split = [self._split(message, layout, out.dtype) for message in messages if messages.numel()]
        dense = [_slots(message[0], layout.dense[index]) for message in split]
        for (start, length), slots in zip(layout.dense[index], zip(*dense, strict=True), strict=True):
            total = self._take("total", (length,), out.device).copy_(slots[0])
            for slot in slots[1:]:
                total.add_(slot)
            out[start : start + length].copy_(total)
        for piece, blocks in _parts(layout.pieces[index], out.device):
            total = self._sum_blocks([(scales[blocks], codes[blocks]) for _, scales, codes in split])
            out[piece.start : piece.start + piece.numel].copy_(total.view(-1)[: piece.numel])

    @torch.no_grad()
    def errors(
        self, values: Tensor, layout: BlockLayout, messages: Tensor, note: Callable[[Tensor, Tensor], None]
    ) -> None:
        """See `Codec`."""
        for index, message in enumerate(self._by_message(messages, layout, values.dtype)):
            _, scales, codes = self._split(message, layout, values.dtype)
            for piece, blocks in _parts(layout.pieces[index], values.device):
                decoded = self._sum_blocks([(scales[blocks], codes[blocks])])
                sent = self._load(values, piece)
                # Not what fills up a short block: rotated, it has errors that nobody receives.
                note(*(each.view(-1)[: piece.numel] for each in (sent, torch.sub(sent, decoded, out=decoded))))

    def _by_message(self, messages: Tensor, layout: BlockLayout, dtype: torch.dtype) -> Tensor:
        """(N, message_bytes), or none where they are empty. ValueError where that does not fit."""
        nbytes = self.message_bytes(layout, dtype)
        if messages.numel() != layout.messages * nbytes:
            raise ValueError(f"{layout.messages} messages of {nbytes} bytes do not fit into {tuple(messages.shape)}")
        return messages.view(layout.messages if nbytes else 0, nbytes)

    def _split(self, message: Tensor, layout: BlockLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The sections of one message: dense values, scales (blocks,) and codes (blocks, code_bytes), as views."""
        scales, codes, _ = layout.sections(self.code_bytes, dtype.itemsize)
        return (
            message[: layout.dense_numel * dtype.itemsize].view(dtype),
            message[scales : scales + 2 * layout.blocks].view(torch.bfloat16),
            message[codes : codes + layout.blocks * self.code_bytes].view(layout.blocks, self.code_bytes),
        )

    def _load(self, values: Tensor, piece: Piece) -> Tensor:
        """(blocks, 128) in fp32, filled up with zeros."""
        blocks = -(-piece.numel // BLOCK)
        loaded = self._take("loaded", (blocks, BLOCK), values.device).view(-1)
        loaded[: piece.numel].copy_(values[piece.start : piece.start + piece.numel])
        loaded[piece.numel :].zero_()
        return loaded.view(blocks, BLOCK)

    def _encode_blocks(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Encode X (b, 128), fp32, which is overwritten."""
        if self.format == "exact":
            scales.fill_(1.0)
            codes.view(torch.float32).copy_(x)
            return
        # A pass for the absolute values, because torch's norm in a row costs as much as the rotation.
        sizes, gain = self._take("sizes", x.shape, x.device), 1
        if self.rotated:
            with fp32_products():
                x, sizes, gain = torch.mm(x, self.rotation(x.device).T, out=sizes), x, BLOCK
        largest = LARGEST[self.format]
        peak = torch.amax(torch.abs(x, out=sizes), 1, keepdim=True, out=self._take("peak", (x.shape[0], 1), x.device))
        # Not divided: torch does that differently on a GPU.
        scales.copy_(peak.mul_(1.0 / (largest * gain)).view(-1))
        # By the scale as it travels. What is divided by 0 or by infinity is 0, or NaN, which no code can hold.
        x.div_(peak.copy_(scales.view(-1, 1)).mul_(gain))
        if self.format == "fp8":
            codes.view(torch.float8_e4m3fn).copy_(x.clamp_(-largest, largest).nan_to_num_(0.0))
            return
        x.round_().clamp_(-largest, largest).nan_to_num_(0.0)
        if self.format == "int8":
            codes.view(torch.int8).copy_(x)
        else:
            half = BLOCK // 2  # in a byte: value j below, value j + 64 above, both plus 8
            packed = self._take("packed", (x.shape[0], half), x.device)
            codes.copy_(torch.add(x[:, :half], x[:, half:], alpha=16.0, out=packed).add_(8.0 * 17.0))

    def _sum_blocks(self, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The sum of what some senders' scales and codes stand for, (b, 128) in fp32, in scratch memory."""
        (scales, codes), *others = parts
        total = self._widened(codes, "total")
        if self.rotated and not others:
            # The scale comes after the sums: whatever precision the product has, it is exact for such integers.
            total = self._rotated_back(total)
        total.mul_(self._scale(scales))
        for scales, codes in others:
            total.addcmul_(self._widened(codes, "addend"), self._scale(scales))
        return self._rotated_back(total) if self.rotated and others else total

    def _rotated_back(self, x: Tensor) -> Tensor:
        with fp32_products():
            return torch.mm(x, self.rotation(x.device), out=self._take("sizes", x.shape, x.device))

    def _widened(self, codes: Tensor, name: str) -> Tensor:
        """Codes as numbers, (b, 128) in fp32."""
        out = self._take(name, (codes.shape[0], BLOCK), codes.device)
        if self.format == "exact":
            out.copy_(codes.view(torch.float32))
        elif self.format == "int4":
            half, nibbles = BLOCK // 2, self._scratch.take("nibbles", codes.shape, torch.uint8, codes.device)
            out[:, :half].copy_(torch.bitwise_and(codes, 15, out=nibbles))
            out[:, half:].copy_(torch.bitwise_right_shift(codes, 4, out=nibbles))
            out.sub_(8.0)
        elif self.format == "int8":
            out.copy_(codes.view(torch.int8))
        else:
            # A cast of torch's takes ten times as long: sign and exponent to their places, and the bias is 120 less.
            out.view(torch.int32).copy_(codes.view(torch.int8)).bitwise_left_shift_(20).bitwise_and_(-0x7810_0000)
            out.mul_(2.0**120)
        return out

    def _scale(self, scales: Tensor) -> Tensor:
        """(b, 1) in fp32."""
        return self._take("scale", (scales.shape[0], 1), scales.device).copy_(scales.view(-1, 1))

    def _take(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return self._scratch.take(name, tuple(shape), torch.float32, device)


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix, (size, size), of entries +-1; size is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _parts(pieces: tuple[Piece, ...], device: torch.device) -> Iterator[tuple[Piece, slice]]:
    """Pieces cut into parts of at most `_AT_ONCE` blocks; with each, the blocks that it is."""
    most = _AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_GPU
    for piece in pieces:
        for done in range(0, piece.numel, most * BLOCK):
            numel = min(piece.numel - done, most * BLOCK)
            block = piece.block + done // BLOCK
            yield Piece(piece.start + done, numel, block), slice(block, block - (-numel // BLOCK))


def _slots(section: Tensor, ranges: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
    """What of a message's dense section belongs to which range."""
    lengths = [length for _, length in ranges]
    return section[: sum(lengths)].split(lengths)
