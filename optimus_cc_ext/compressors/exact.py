"""Codec of exact differences: new values of 16 bits become a message from which the receiver of their old values
restores them to the bit.

    1. d = ordered(new) - ordered(old), modulo 2^16      ordered: bit patterns in the order of the numbers
    2. z = 2 d for d >= 0, else -2 d - 1                 small numbers for small steps of either sign
    3. Rice code: z >> k zeros, a one, the lowest k bits of z; for 8 zeros or more: 8 zeros, a one, the 16 bits of z

Only bit patterns are compared, so NaN, infinities and negative zero are restored too. An optimizer's steps are about as
long for small values as for large ones, whose last place is larger by their exponent: k = shift - exponent of the old
value, from 0 to 15, where each piece of 64 lanes has its own shift, chosen by a few of their values.

Lane j of a piece has the values j, j + 64, j + 128, ..., and words of its own, lowest bit first: on a GPU each thread
packs one lane, and neighbouring threads read neighbouring values. A message is [checksum of the old values, int32, and
zeros up to 16 bytes | words of each lane, uint8 | shift of each piece, uint8, and zeros up to a multiple of 4 bytes |
words, lane after lane, int32]. If it would be no shorter than the values, these are sent raw, behind the header.

The host never waits for a GPU: lengths and checksums stay on the device. The caller of `decode` has to know whether the
message is raw.
"""

from collections.abc import Iterator
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

HEADER = 16
"""Number of bytes of the header at the start of a message."""

LANES, STEPS, SAMPLED = 64, 256, 32
"""Lanes of a piece, most values of a lane, and the distance between steps whose values choose the piece's shift."""

TOGETHER = 2048
"""Lanes of a message that is shorter than `STEPS` times as many values: torch decodes a value of each of them at once.
They have `SAMPLED` values at least.
"""

LIMIT, LONGEST = 8, 25
"""Number of zeros that announces a difference with all of its 16 bits, and the length of such a code in bits."""

NO_EXPONENT, _NO_VALUE = 256, 16
"""Exponent of a lane's places behind the last value, larger than any shift, and their width where codes are read."""

GOLDEN = -0x61C88645
"""2^32 times the golden ratio, as int32, and odd: its powers and multiples modulo 2^32 look as if drawn by chance."""

_CHUNK = 1 << 20
"""Values that torch encodes at once, with some 50 bytes of intermediate results each."""


def raw_bytes(numel: int) -> int:
    """Return the bytes of a message whose values are sent as they are, the longest one of `numel` values."""
    return HEADER + 2 * numel


def steps_of(numel: int) -> int:
    """Return how many values the lanes of a message of `numel` values have: a power of two."""
    return min(STEPS, 1 << (max(numel, SAMPLED * TOGETHER) - 1).bit_length() - (TOGETHER - 1).bit_length())


@torch.no_grad()
def encode(old: Tensor, new: Tensor, message: Tensor, kernels: ModuleType | None = None) -> Tensor:
    """Encode `new`, in bf16 or fp16, for receivers of `old`; both are flat and equally long.

    Args:
        message: flat uint8, to be overwritten; its length is a multiple of 4.
        kernels: module with `code` and `restore` for these tensors, in place of those of torch (`fast.exact_kernels`).

    Returns:
        The bytes of the message, on its device, 0-dim. If it does not fit into `message`, or would not be shorter than
        the values, these are `raw_bytes`, and of `message` only the header counts, behind which the values are sent.
    """
    before, after, raw, first = old.view(torch.int16), new.view(torch.int16), raw_bytes(len(new)), first_word(len(new))
    most = min(len(message), raw - 1) // 4 * 4
    header = message[:HEADER].view(torch.int32).zero_()
    if first >= most:
        header[0] = _checksum(before)
        return torch.full_like(header[0], raw)
    write = kernels.code if kernels else code
    words = message[first:most].view(torch.int32)
    header[0], length = write(before, after, old.dtype is torch.float16, message[HEADER:first], words)
    return torch.where(length <= len(words), first + 4 * length, raw)


@torch.no_grad()
def decode(message: Tensor, values: Tensor, kernels: ModuleType | None = None, *, raw: bool) -> Tensor:
    """Replace the old values in `values` by the new ones.

    Args:
        raw: True if the message is raw.

    Returns:
        False, on the device of `values` and 0-dim, if these are not the old values that the message was made from. A
        kernel, which reads the old values once, has written anything then; torch has written nothing, unless raw.
    """
    patterns, half, first = values.view(torch.int16), values.dtype is torch.float16, first_word(len(values))
    expected = message[:HEADER].view(torch.int32)[0]
    if raw:
        whole = expected == _checksum(patterns).to(torch.int32)
        values.view(torch.uint8).copy_(message[HEADER : raw_bytes(len(values))])
        return whole
    coded = message[HEADER:first], message[first : len(message) // 4 * 4].view(torch.int32)
    if kernels:
        return expected == kernels.restore(patterns, half, *coded).to(torch.int32)
    if whole := expected == _checksum(patterns).to(torch.int32):
        restore(patterns, half, *coded)
    return whole


def code(before: Tensor, after: Tensor, half: bool, tables: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Write the tables of a message, and its words if there is room.

    Args:
        before: old patterns, int16, and `after` the new ones.
        half: True for fp16, False for bf16.
        tables: uint8.
        words: int32.

    Returns:
        The checksum (int64, valid modulo 2^32) and the number of words (int32), both 0-dim.
    """
    steps = steps_of(len(before))
    parts = [_code(before[each], after[each], steps, half) for each in _chunks(len(before), _CHUNK)]
    *found, codes = map(torch.cat, zip(*parts, strict=True))
    tables[-4:].zero_()
    for section, values in zip(sections(tables, len(before)), found, strict=True):
        section.copy_(values)
    if len(codes) <= len(words):
        words[: len(codes)].copy_(codes)
    return _checksum(before), sections(tables, len(before))[0].sum(dtype=torch.int32)


def restore(patterns: Tensor, half: bool, tables: Tensor, words: Tensor) -> None:
    """Replace old patterns by new ones; the arguments are those of `code`."""
    lengths, shifts = sections(tables, len(patterns))
    ends, end, steps = lengths.cumsum(0, dtype=torch.int32), 0, steps_of(len(patterns))
    every = _chunks(len(shifts), _CHUNK // (LANES * steps))
    for each, pieces in zip(_chunks(len(patterns), _CHUNK), every, strict=True):
        lanes = slice(pieces.start * LANES, pieces.stop * LANES)
        start, end = end, int(ends[lanes][-1])
        first = ends[lanes] - lengths[lanes] - start
        _restore(patterns[each], steps, half, shifts[pieces].to(torch.int32), first, words[start:end])


def sections(tables: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the two tables of a message of `numel` values: the lengths of its lanes, and the shifts of its pieces."""
    pieces = _pieces(numel)
    return tables[: LANES * pieces], tables[LANES * pieces : (LANES + 1) * pieces]


def first_word(numel: int) -> int:
    """Return the bytes in front of the words of a message."""
    return HEADER + -(-(LANES + 1) * _pieces(numel) // 4) * 4


def _pieces(numel: int) -> int:
    return -(-numel // (LANES * steps_of(numel)))


def _signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def _checksum(patterns: Tensor) -> Tensor:
    """Sum up bit patterns times odd numbers, by their step and by their lane, counted modulo 2^32."""
    total, steps = torch.zeros((), dtype=torch.int64, device=patterns.device), steps_of(len(patterns))
    powers = _powers(steps, patterns.device)
    for number, each in enumerate(_chunks(len(patterns), _CHUNK)):
        values = _padded(patterns[each], LANES * steps).view(-1, steps, LANES).to(torch.int32).bitwise_and_(0xFFFF)
        lanes = values.mul_(powers).sum(1).view(-1)
        place = torch.arange(1, len(lanes) + 1, device=lanes.device).add_(number * _CHUNK // steps)
        mixed = (place * GOLDEN).to(torch.int32)
        total += (lanes * (mixed ^ (mixed >> 15)).bitwise_or_(1)).sum()
    return total


@cache
def _powers(steps: int, device: torch.device) -> Tensor:
    """Return the odd numbers of the steps of a lane, powers of `GOLDEN` modulo 2^32, in int32, (steps, 1)."""
    powers = [_signed(pow(GOLDEN, step, 2**32)) for step in range(steps)]
    return torch.tensor(powers, dtype=torch.int32, device=device)[:, None]


def _chunks(length: int, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, length, most))


def _padded(values: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % multiple))


def _lanes(patterns: Tensor, steps: int) -> Tensor:
    """Return patterns with a column for each lane, (steps, lanes); steps are fewer if there is a single short piece."""
    steps = min(steps, -(-len(patterns) // LANES))
    return _padded(patterns, steps * LANES).view(-1, steps, LANES).transpose(0, 1).reshape(steps, -1)


def _ordered(patterns: Tensor) -> Tensor:
    """Return bit patterns as int16 in the order of their numbers, or such integers as patterns: it is its own
    inverse.
    """
    return patterns ^ ((patterns >> 15) & 0x7FFF)


def _exponents(patterns: Tensor, numel: int, half: bool) -> Tensor:
    """Return the exponents of the patterns in lanes, in int32; NO_EXPONENT behind the last of `numel` values."""
    exponents = (patterns >> (10 if half else 7)).bitwise_and_(0x1F if half else 0xFF).to(torch.int32)
    return _filled(exponents, numel, NO_EXPONENT)


def _filled(lanes: Tensor, numel: int, value: int) -> Tensor:
    """Fill the places behind the last of `numel` values."""
    row, lane = divmod((numel - 1) % (len(lanes) * LANES) + 1, LANES)
    lanes[row : row + 1, lanes.shape[1] - LANES + lane :] = value
    lanes[row + 1 :, -LANES:] = value
    return lanes


def _shifts(numbers: Tensor, exponents: Tensor) -> Tensor:
    """Choose the shift of each piece, in int32, by bisection: the next larger one would not save bits."""
    z, e = (each[::SAMPLED].reshape(-1, each.shape[1] // LANES, LANES) for each in (numbers, exponents))
    shifts = torch.zeros(z.shape[1], dtype=torch.int32, device=z.device)
    for bit in range(7, -1, -1):
        tried = shifts + (1 << bit)
        width = tried[:, None] - 1 - e
        # One bit more of a value's width halves its zeros. Above 15 it would, too, so that few outliers decide nothing.
        saved = (z >> width.clamp(0, 16)).add_(1).bitwise_right_shift_(1).clamp_(max=LIMIT).sub_(1)
        shifts = torch.where(torch.where(width < 0, 0, saved).sum((0, 2)) < 0, shifts, tried)
    return shifts


def _code(before: Tensor, after: Tensor, steps: int, half: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sections of a chunk's message: lengths of its lanes and shifts of its pieces, uint8; words, int32."""
    numel, before, after = len(before), _lanes(before, steps), _lanes(after, steps)
    difference = _ordered(after).sub_(_ordered(before))
    number = (difference >> 15).bitwise_xor_(difference << 1).to(torch.int32).bitwise_and_(0xFFFF)
    exponents = _exponents(before, numel, half)
    shifts = _shifts(number, exponents)
    width = _width(shifts, exponents)
    zeros = number >> width
    long = (zeros.view(-1) >= LIMIT).nonzero().view(-1)
    bits = (zeros + width).add_(1)
    bits.view(-1)[long] = LONGEST
    code = number.sub(zeros << width).bitwise_left_shift_(1).add_(1)
    code.view(-1)[long] = number.view(-1)[long] * 2 + 1
    code = _filled(code, numel, 0).to(torch.int64).bitwise_left_shift_(zeros.clamp_(max=LIMIT))
    start = _filled(bits, numel, 0).cumsum(0, dtype=torch.int32)
    lengths = (start[-1] + 31) >> 5
    start.sub_(bits).add_((lengths.cumsum(0, dtype=torch.int32) - lengths) << 5)
    # Each sum of two halves of a word is free of carries, because no two values share a bit.
    code.bitwise_left_shift_(start & 31)
    halves = code.new_zeros(int(lengths.sum()) + 1)
    halves.scatter_add_(0, start.bitwise_right_shift_(5).view(-1).to(torch.int64), code.view(-1))
    words = (halves & 0xFFFFFFFF)[:-1]
    words[1:] += halves[:-2] >> 32
    return lengths.to(torch.uint8), shifts.to(torch.uint8), words.to(torch.int32)


def _restore(patterns: Tensor, steps: int, half: bool, shifts: Tensor, first: Tensor, words: Tensor) -> None:
    """Replace a chunk's old patterns by the new ones, given each lane's first word."""
    before = _lanes(patterns, steps)
    width = _width(shifts, _exponents(before, len(patterns), half))
    # Each lane knows its next value's bits by that value's zeros and width, so that steps follow each other.
    windows, bits_of = _windows(words), _bits_of(words.device)
    fields = _filled(width << LIMIT + 1, len(patterns), _NO_VALUE << LIMIT + 1)
    window, bits = torch.empty_like(width), torch.empty_like(width)
    at = first << 5
    place, rest = torch.empty_like(at), torch.empty_like(at)
    for own_window, own_bits, field in zip(window, bits, fields, strict=True):
        torch.bitwise_right_shift(at, 3, out=place)
        torch.index_select(windows, 0, place, out=own_window)
        own_window.bitwise_right_shift_(torch.bitwise_and(at, 7, out=rest))
        torch.bitwise_and(own_window, (2 << LIMIT) - 1, out=place).bitwise_or_(field)
        torch.index_select(bits_of, 0, place, out=own_bits)
        at.add_(own_bits)
    long = (bits.view(-1) == LONGEST).nonzero().view(-1)
    whole = (window.view(-1)[long] >> LIMIT + 1) & 0xFFFF
    zeros = bits.sub_(width).sub_(1)
    low = (window >> (zeros + 1)).bitwise_and_((torch.ones_like(width) << width).sub_(1))
    number = zeros.bitwise_left_shift_(width).bitwise_or_(low)
    number.view(-1)[long] = whole
    difference = (number & 1).neg_().bitwise_xor_(number >> 1).to(torch.int16)
    after = _ordered(difference.add_(_ordered(before)))
    after = after.view(len(after), -1, LANES).transpose(0, 1).reshape(-1)
    patterns.copy_(after[: len(patterns)])


def _width(shifts: Tensor, exponents: Tensor) -> Tensor:
    """Return the number of lowest bits of each value, in lanes."""
    return shifts.repeat_interleave(LANES).sub(exponents).clamp_(0, 15)


def _windows(words: Tensor) -> Tensor:
    """Return the 32 bits from each byte of the words on."""
    whole = torch.cat([words, words.new_zeros(2)]).to(torch.int64).bitwise_and_(0xFFFFFFFF)
    whole = whole[:-1] | whole[1:] << 32
    return (whole[:, None] >> torch.arange(0, 32, 8, device=words.device)).to(torch.int32).view(-1)


@cache
def _bits_of(device: torch.device) -> Tensor:
    """Return the bits of a value's code by its width, or 0 for no value, and by the code's first bits, (17 * 512,)."""
    first = torch.arange(2 << LIMIT) | 1 << LIMIT
    zeros = (first & -first).to(torch.float32).log2().to(torch.int32)
    bits = zeros + torch.arange(1, _NO_VALUE + 2, dtype=torch.int32)[:, None]
    bits.masked_fill_(zeros == LIMIT, LONGEST)[_NO_VALUE] = 0
    return bits.view(-1).to(device)
