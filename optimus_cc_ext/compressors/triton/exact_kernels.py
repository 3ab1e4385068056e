"""Triton kernels of exact differences; `exact` calls them, and the module `compressors.exact` says what they compute.

A program has one piece, and a thread one lane of STEPS values. HALF: values are fp16, else bf16. Patterns of 16 bits
are in the upper half of 32 bits, so that their arithmetic is modulo 2^16, and what is in the lower half does not count.
The loops take sixteen steps at a time without masks, and then the rest one by one.
"""

import triton
import triton.language as tl

from optimus_cc_ext.compressors import exact

LANES = tl.constexpr(exact.LANES)
SAMPLED, LIMIT, LONGEST = tl.constexpr(exact.SAMPLED), tl.constexpr(exact.LIMIT), tl.constexpr(exact.LONGEST)
GOLDEN, NO_EXPONENT = tl.constexpr(exact.GOLDEN), tl.constexpr(exact.NO_EXPONENT)
UNROLLED = tl.constexpr(16)


@triton.jit
def _load(values, used):
    found = tl.load(values) if used is None else tl.load(values, mask=used, other=0)
    return found.to(tl.int32) << 16


@triton.jit
def _ordered(pattern):
    return pattern ^ ((pattern >> 31) & 0x7FFF0000)


@triton.jit
def _double(before, after):
    """Return twice the number of a difference, and one, as uint32."""
    difference = _ordered(after) - _ordered(before)
    return (((difference << 1) ^ (difference >> 31)).to(tl.uint32, bitcast=True) >> 15) | 1


@triton.jit
def _exponent(before, HALF: tl.constexpr):
    return (before >> 26) & 0x1F if HALF else (before >> 23) & 0xFF


@triton.jit
def _width(shift, before, HALF: tl.constexpr):
    """Return how many bits of a number follow its zeros, with the one between them, as uint32."""
    return tl.minimum(tl.maximum(shift + 1 - _exponent(before, HALF), 1), 16).to(tl.uint32)


@triton.jit
def _odd(place):
    mixed = (place + 1) * GOLDEN
    return (mixed ^ (mixed >> 15)) | 1


@triton.jit
def _checked(total, power, before):
    """Add patterns times odd numbers, the powers of `GOLDEN`, to the checksum; return it and the next power."""
    return total + (before.to(tl.uint32, bitcast=True) >> 16).to(tl.int32) * power, power * GOLDEN


@triton.jit
def _store_checksum(sums, total):
    piece = tl.program_id(0)
    odd = _odd(piece * LANES + tl.arange(0, LANES))
    tl.store(sums + piece, tl.sum((total * odd).to(tl.int64), axis=0))


@triton.jit
def _shift(old, new, left, STEPS: tl.constexpr, HALF: tl.constexpr):
    """Choose the shift of a piece of `left` values."""
    place = tl.arange(0, STEPS // SAMPLED)[:, None] * (SAMPLED * LANES) + tl.arange(0, LANES)[None, :]
    used = place < left
    before = _load(old + place, used)
    double = _double(before, _load(new + place, used))
    exponent = tl.where(used, _exponent(before, HALF), NO_EXPONENT)
    shift = 0
    for bit in tl.static_range(8):
        tried = shift + (128 >> bit)
        width = tried - 1 - exponent
        halved = ((double >> tl.minimum(tl.maximum(width + 1, 1), 17).to(tl.uint32)).to(tl.int32) + 1) >> 1
        saved = tl.where(width < 0, 0, tl.minimum(halved, LIMIT) - 1)
        shift = tl.where(tl.sum(tl.sum(saved, axis=1), axis=0) < 0, shift, tried)
    return shift


@triton.jit
def _counted(bits, total, power, old, new, used, shift, HALF: tl.constexpr):
    """Count the bits of one step's values."""
    before = _load(old, used)
    width = _width(shift, before, HALF)
    zeros = _double(before, _load(new, used)) >> width
    own = tl.where(zeros < LIMIT, zeros + width, LONGEST)
    total, power = _checked(total, power, before)
    return bits + (own if used is None else tl.where(used, own, 0)), total, power


@triton.jit
def measure(old, new, lengths, shifts, sums, numel, STEPS: tl.constexpr, HALF: tl.constexpr):
    """Write the words of each lane and the shift of each piece (uint8), and the checksum of the piece's old values
    (int64). Grid: (pieces,).
    """
    piece, lane = tl.program_id(0), tl.arange(0, LANES)
    start = piece.to(tl.int64) * (STEPS * LANES)
    left = tl.minimum(numel - start, STEPS * LANES).to(tl.int32)
    shift = _shift(old + start, new + start, left, STEPS, HALF)
    old, new = old + start + lane, new + start + lane
    bits, total, power = tl.zeros((LANES,), tl.uint32), tl.zeros((LANES,), tl.int32), tl.full((), 1, tl.int32)
    while left >= UNROLLED * LANES:
        for step in tl.static_range(UNROLLED):
            bits, total, power = _counted(bits, total, power, old + step * LANES, new + step * LANES, None, shift, HALF)
        old, new, left = old + UNROLLED * LANES, new + UNROLLED * LANES, left - UNROLLED * LANES
    while left > 0:
        bits, total, power = _counted(bits, total, power, old, new, lane < left, shift, HALF)
        old, new, left = old + LANES, new + LANES, left - LANES
    tl.store(lengths + piece * LANES + lane, ((bits + 31) >> 5).to(tl.uint8))
    tl.store(shifts + piece, shift.to(tl.uint8))
    _store_checksum(sums, total)


@triton.jit
def _put(words, at, word, filled, old, new, used, shift, HALF: tl.constexpr):
    """Add the codes of one step's values to the words that lanes have begun."""
    before = _load(old, used)
    double = _double(before, _load(new, used))
    width = _width(shift, before, HALF)
    zeros = double >> width
    zeros, width = tl.minimum(zeros, LIMIT), tl.where(zeros < LIMIT, width, LONGEST - LIMIT)
    code = (double & ((0xFFFFFFFF << width) ^ 0xFFFFFFFF)) << zeros
    bits = zeros + width
    if used is not None:
        code, bits = tl.where(used, code, 0), tl.where(used, bits, 0)
    wide = code.to(tl.uint64) << filled.to(tl.uint64)
    word |= wide.to(tl.uint32)
    filled += bits
    full = filled >= 32
    tl.store(words + at, word.to(tl.int32, bitcast=True), mask=full)
    return at + (filled >> 5), tl.where(full, (wide >> 32).to(tl.uint32), word), filled & 31


@triton.jit
def pack(old, new, shifts, first, needed, words, numel, length, STEPS: tl.constexpr, HALF: tl.constexpr):
    """Write the words of all lanes, each from its `first` one on, unless more words are `needed` than `length`. Grid:
    (pieces,).
    """
    piece, lane = tl.program_id(0), tl.arange(0, LANES)
    start = piece.to(tl.int64) * (STEPS * LANES)
    left = tl.minimum(numel - start, STEPS * LANES).to(tl.int32)
    left = tl.where(tl.load(needed) <= length, left, 0)
    old, new = old + start + lane, new + start + lane
    shift = tl.load(shifts + piece).to(tl.int32)
    at = tl.load(first + piece * LANES + lane).to(tl.uint32)
    word, filled = tl.zeros((LANES,), tl.uint32), tl.zeros((LANES,), tl.uint32)
    while left >= UNROLLED * LANES:
        for step in tl.static_range(UNROLLED):
            at, word, filled = _put(words, at, word, filled, old + step * LANES, new + step * LANES, None, shift, HALF)
        old, new, left = old + UNROLLED * LANES, new + UNROLLED * LANES, left - UNROLLED * LANES
    while left > 0:
        at, word, filled = _put(words, at, word, filled, old, new, lane < left, shift, HALF)
        old, new, left = old + LANES, new + LANES, left - LANES
    tl.store(words + at, word.to(tl.int32, bitcast=True), mask=filled > 0)


@triton.jit
def _following(words, word, room, used, otherwise):
    """Return a lane's words behind `word`. There may be none: other old values than the sender's lead anywhere."""
    return tl.load(words + 1 + word, mask=used & (word.to(tl.int32) < room), other=otherwise)


@triton.jit
def _zeros(window):
    """Return the number of trailing zeros of each window, read from the exponent of its lowest one as fp32."""
    one = (window & (0 - window)) | 0x4B000000
    power = one.to(tl.float32, bitcast=True) - 8388608.0
    return ((power.to(tl.uint32, bitcast=True) >> 23) + 1) & 15


@triton.jit
def _taken(words, read, word, following, total, power, values, used, room, shift, HALF: tl.constexpr):
    """Replace one step's values by the codes that come next, `read` bits from the start of each lane."""
    before = _load(values, used)
    total, power = _checked(total, power, before)
    window = (word >> (read & 31)) | ((following << 1) << (31 - (read & 31)))
    zeros = _zeros(window)
    width = tl.where(zeros < LIMIT, _width(shift, before, HALF), LONGEST - LIMIT)
    # Twice the number, and one; what is above its 16 bits falls off.
    double = (zeros << width) | ((window >> zeros) & ((0xFFFFFFFF << width) ^ 0xFFFFFFFF))
    difference = (double << 14).to(tl.int32, bitcast=True) ^ ((double << 30).to(tl.int32, bitcast=True) >> 31)
    after = _ordered(_ordered(before) + difference)
    tl.store(values, (after >> 16).to(tl.int16), mask=used)
    then = read + zeros + width
    full = (then >> 5) != (read >> 5)
    word = tl.where(full, following, word)
    following = _following(words, then >> 5, room, full, following)
    return then, word, following, total, power


@triton.jit
def unpack(values, shifts, first, words, sums, numel, length, STEPS: tl.constexpr, HALF: tl.constexpr):
    """Replace old values by new ones, and write the checksum of the piece's old values (int64); there are `length`
    words. Grid: (pieces,).
    """
    piece, lane = tl.program_id(0), tl.arange(0, LANES)
    start = piece.to(tl.int64) * (STEPS * LANES)
    left = tl.minimum(numel - start, STEPS * LANES).to(tl.int32)
    values += start + lane
    shift = tl.load(shifts + piece).to(tl.int32)
    at = tl.load(first + piece * LANES + lane)
    words, room = words.to(tl.pointer_type(tl.uint32), bitcast=True) + at, length - 1 - at
    read, total, power = tl.zeros((LANES,), tl.uint32), tl.zeros((LANES,), tl.int32), tl.full((), 1, tl.int32)
    word = tl.load(words, mask=room >= 0, other=0)
    following = _following(words, read, room, True, word)
    while left >= UNROLLED * LANES:
        for step in tl.static_range(UNROLLED):
            read, word, following, total, power = _taken(
                words, read, word, following, total, power, values + step * LANES, None, room, shift, HALF
            )
        values, left = values + UNROLLED * LANES, left - UNROLLED * LANES
    while left > 0:
        read, word, following, total, power = _taken(
            words, read, word, following, total, power, values, lane < left, room, shift, HALF
        )
        values, left = values + LANES, left - LANES
    _store_checksum(sums, total)
