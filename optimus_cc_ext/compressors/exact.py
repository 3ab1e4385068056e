"""Codec of exact differences: new values of 16 bits become a message from which the receiver of their old values
restores them to the bit.

    1. d = ordered(new) - ordered(old), modulo 2^16      ordered: bit patterns in the order of the numbers
    2. z = 2 d for d >= 0, else -2 d - 1                 small numbers for small steps of either sign
    3. Rice code: the lowest k bits of z as they are, and z >> k as so many zeros and a one

Patterns are all that counts, so that NaN, infinities and negative zero come through. A value's k follows from its old
exponent by the table of its chunk, because the last place of a small value is small. There are no escapes: a table can
say k = 15, where each value takes 16 or 17 bits, and a message that would be no shorter than the values is sent raw.

A message is [checksum of the old values, 0, or 1 if the values follow raw | chunks]. A chunk of `_CHUNK` values is
[bytes of both sections | tables | section of ones | section of lowest bits]. Each `_KIND` values have a table of 256
fields of 4 bits, because matrices and embeddings take different steps. The decoder finds each value by prefix sums, and
needs nothing but the old values and the message.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

HEADER = 16
"""Number of bytes of the header at the start of a message."""

_CHUNK, _CHUNK_ON_GPU = 1 << 18, 1 << 21
"""Values that are encoded at once: fewer would cost more in calls than they gain by the cache. On a GPU, where the host
waits for each chunk, a chunk takes some 100 MB for intermediate results.
"""

_KIND = 1 << 15
"""Values that share a table."""

_EXPONENTS, _LENGTHS, _WIDTHS = 256, 17, 16


def raw_bytes(numel: int) -> int:
    """Return the bytes of a message whose values are sent as they are, the longest one of `numel` values."""
    return HEADER + 2 * numel


@torch.no_grad()
def encode(old: Tensor, new: Tensor, message: Tensor) -> int:
    """Encode `new`, in bf16 or fp16, for receivers of `old`; both are flat and equally long.

    Args:
        message: flat uint8, to be overwritten; its length is a multiple of 8.

    Returns:
        The bytes of the message. If it does not fit into `message`, or would not be shorter than the values, these are
        `raw_bytes`, and `message` holds the header alone, behind which the values have to be sent.
    """
    before, after, raw = old.view(torch.int16), new.view(torch.int16), raw_bytes(new.numel())
    header, most, at = message[:HEADER].view(torch.int64), min(message.numel(), raw - 1), HEADER
    header.copy_(torch.tensor([_checksum(before), 0]))
    for chunk in _chunks(before):
        ones, low, tables = _code(before[chunk], after[chunk])
        lengths = torch.tensor([ones.nbytes, low.nbytes], dtype=torch.int32, device=message.device)
        parts = [lengths, tables[0::2] | tables[1::2] << 4, ones, low]
        start, at = at, at + sum(part.nbytes for part in parts)
        if at > most:
            header[1] = 1
            return raw
        torch.cat([part.view(torch.uint8) for part in parts], out=message[start:at])
    return at


@torch.no_grad()
def decode(message: Tensor, values: Tensor) -> bool:
    """Replace the old values in `values` by the new ones.

    Returns:
        False if `values` are not the old values that the message was made from; then nothing is written.
    """
    patterns = values.view(torch.int16)
    checksum, raw = message[:HEADER].view(torch.int64).tolist()
    if checksum != _checksum(patterns):
        return False
    if raw:
        values.view(torch.uint8).copy_(message[HEADER : raw_bytes(values.numel())])
        return True
    at = HEADER
    for chunk in _chunks(patterns):
        part = patterns[chunk]
        lengths = [8, _tables(part) * _EXPONENTS // 2, *message[at : at + 8].view(torch.int32).tolist()]
        _, fields, ones, low = message[at : at + sum(lengths)].split(lengths)
        _restore(part, torch.stack((fields & 15, fields >> 4), 1).view(-1), ones, low)
        at += sum(lengths)
    return True


def _checksum(patterns: Tensor) -> int:
    """Sum up bit patterns, four at a time, times odd numbers by place, modulo 2^64, wherever the tensor begins."""
    total = 0
    for part in map(patterns.__getitem__, _chunks(patterns)):
        words = torch.cat([part, part.new_zeros(-len(part) % 4)]).view(torch.int64)
        total = 3 * total + int(words.mul_(torch.arange(1, 2 * len(words), 2, device=words.device)).sum())
    return (total + 2**63) % 2**64 - 2**63


def _chunks(values: Tensor) -> Iterator[slice]:
    length = _CHUNK if values.device.type == "cpu" else _CHUNK_ON_GPU
    return (slice(start, start + length) for start in range(0, values.numel(), length))


def _tables(values: Tensor) -> int:
    """Return the number of tables of a chunk."""
    return -(-values.numel() // _KIND)


def _ordered(patterns: Tensor) -> Tensor:
    """Return bit patterns as int16 in the order of their numbers, or such integers as patterns: it is its own
    inverse.
    """
    return patterns ^ ((patterns >> 15) & 0x7FFF)


def _fields(patterns: Tensor) -> Tensor:
    """Return the place of each value's width in the tables of its chunk.

    It follows from 8 bits of the old pattern: the exponent in bf16; the exponent and 3 bits of the mantissa in fp16.
    """
    fields = (patterns >> 7).bitwise_and_(0xFF).to(torch.int32)
    for table, part in enumerate(fields.split(_KIND)):
        part.add_(table * _EXPONENTS)
    return fields


def _code(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's sections, in int64 words, and its tables, in uint8."""
    difference = _ordered(after).sub_(_ordered(before))
    number = (difference >> 15).bitwise_xor_(difference << 1).to(torch.int32).bitwise_and_(0xFFFF)
    fields = _fields(before)
    tables = _widths(fields, number, _tables(before))
    width = tables.index_select(0, fields).to(torch.int32)
    places = torch.cumsum((number >> width).add_(1), 0).sub_(1)
    start = torch.cumsum(width, 0, dtype=torch.int32).sub_(width)
    low = number.bitwise_and_(_mask(width)).to(torch.int64).bitwise_left_shift_(start & 31)
    # Each sum of two halves of a word is free of carries, because no two values share a bit.
    halves = low.new_zeros(2 * _words(int(start[-1] + width[-1]) + 32))
    halves.scatter_add_(0, start.bitwise_right_shift_(5).to(torch.int64), low)
    words = halves & 0xFFFFFFFF
    words[1:] += halves[:-1] >> 32
    return _packed(places), words[0::2] | words[1::2] << 32, tables


def _restore(patterns: Tensor, tables: Tensor, ones: Tensor, low: Tensor) -> None:
    """Replace a chunk's old patterns by the new ones, given its tables and its sections in bytes."""
    width = tables.index_select(0, _fields(patterns)).to(torch.int32)
    places = _places(ones)
    number = places.clone()
    number[1:].sub_(places[:-1]).sub_(1)
    number.bitwise_left_shift_(width)
    start = torch.cumsum(width, 0, dtype=torch.int32).sub_(width)
    halves = low.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
    halves[:-1] |= halves[1:] << 32
    lowest = halves.index_select(0, start >> 5).bitwise_right_shift_(start.bitwise_and_(31)).to(torch.int32)
    number.bitwise_or_(lowest.bitwise_and_(_mask(width)))
    difference = (number & 1).neg_().bitwise_xor_(number >> 1).to(torch.int16)
    patterns.copy_(_ordered(difference.add_(_ordered(patterns))))


def _mask(width: Tensor) -> Tensor:
    """Return bit masks: for each width, a number whose lowest `width` bits are ones."""
    return torch.ones_like(width).bitwise_left_shift_(width).sub_(1)


def _widths(fields: Tensor, number: Tensor, tables: int) -> Tensor:
    """Choose the width k of the lowest bits for each field of the tables, for the fewest bits by the numbers'
    lengths.
    """
    length = (number.to(torch.float32).view(torch.int32) >> 23).sub_(126).clamp_(min=0)
    fields_of_lengths = (fields * _LENGTHS).add_(length)
    counts = torch.bincount(fields_of_lengths, minlength=tables * _EXPONENTS * _LENGTHS).view(-1, _LENGTHS)
    return (counts.to(torch.float32) @ _costs().to(number.device)).argmin(1).to(torch.uint8)


@cache
def _costs() -> Tensor:
    """Return the bits of a number of each length for each width, in fp32."""
    middle = torch.tensor([0.0, 1.0, *(0.75 * 2**length for length in range(2, _LENGTHS))])
    widths = torch.arange(_WIDTHS, dtype=torch.float32)
    return torch.floor(middle[:, None] / 2**widths) + 1 + widths


def _words(bits: int) -> int:
    """Return the number of words of 64 bits that hold so many bits."""
    return -(-bits // 64)


def _packed(places: Tensor) -> Tensor:
    """Return words with ones at the given places, of which the last is the largest; the lowest bit is the first."""
    numel = _words(int(places[-1]) + 1) * 64
    if places.device.type == "cpu":
        bits = np.zeros(numel, dtype=np.uint8)
        bits[places.numpy()] = 1
        return torch.from_numpy(np.packbits(bits, bitorder="little")).view(torch.int64)
    spread = torch.zeros(numel, dtype=torch.uint8, device=places.device).scatter_(0, places, 1).view(torch.int64)
    return (spread * 0x0102040810204080 >> 56).to(torch.uint8).view(torch.int64)


def _places(packed: Tensor) -> Tensor:
    """Return the positions of the bits that are set in packed bytes, the lowest bit of a byte first, in int32."""
    if packed.device.type == "cpu":
        bits = np.unpackbits(packed.numpy(), bitorder="little").view(np.bool_)
        return torch.from_numpy(np.flatnonzero(bits)).to(torch.int32)
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1).nonzero().view(-1).to(torch.int32)
