"""Triton kernels of the block formats; `blocks` calls them. Needs triton to be imported.

Conventions of all kernels: a block is a row of a tile, in two halves of 64 columns, `low` and `high`. `table` has
for each block of each message, (N, blocks), the place of its values: start * 256 + length, both divisible by ALIGN; 0
where there is no such block. `codes` and `scales` are pointers to the first message's sections, `strides` the elements
from one message to the next. Equal inputs give equal bits: no atomics, one order of sums.

E4M3 and bf16 are made of integers, so that every GPU, and triton's interpreter, round alike.
"""

import triton
import triton.language as tl

__all__ = ["add_up_blocks", "add_up_values", "copy_values", "encode_blocks"]

BLOCK = tl.constexpr(128)
HALF = tl.constexpr(64)
QUARTER = tl.constexpr(32)
ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""fp32 numbers of this size are integers: a number added to it is rounded to the nearest one, of two to the even."""

ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _bf16_bits(x):
    """Round fp32 to the nearest bf16, of two to the even, as int32. A NaN stays one."""
    bits = _bits(x)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@triton.jit
def _store(pointers, x, mask, BF16: tl.constexpr, ONTO: tl.constexpr):
    """Store x in the dtype of the pointers; with BF16 they point to int16, which stand for bf16.

    ONTO: add x, rounded to that dtype, to what is there.
    """
    if ONTO:
        if BF16:
            there = (tl.load(pointers, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
            x = there + (_bf16_bits(x) << 16).to(tl.float32, bitcast=True)
        else:
            there = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
            x = there + x.to(pointers.dtype.element_ty).to(tl.float32)
    if BF16:
        tl.store(pointers, _bf16_bits(x).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _place(table, message, rows, blocks, ALIGN: tl.constexpr):
    """Return starts and lengths of a message's blocks `rows`; a length of 0 where there is none."""
    entry = tl.load(table + message.to(tl.int64) * blocks + rows, mask=rows < blocks, other=0)
    return tl.multiple_of(entry >> 8, ALIGN), tl.multiple_of((entry & 255).to(tl.int32), ALIGN)


@triton.jit
def _hadamard(x, PARTS: tl.constexpr, PART: tl.constexpr, WIDEN: tl.constexpr):
    """Return X H, (rows, 64), for the Hadamard matrix of 64 x 64, of entries (-1)^(bits that i and j have in common).

    Tensor cores multiply 16-bit numbers: X is the sum of PARTS tensors of dtype PART, here exactly, and products with
    1 and -1 are exact. WIDEN: multiply them in fp32, for triton's interpreter cannot multiply bf16.
    """
    i, j = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    common = i & j
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    matrix = (1 - 2 * (common & 1)).to(tl.float32)
    if not WIDEN:
        matrix = matrix.to(PART)
    product = tl.zeros(x.shape, tl.float32)
    for _ in tl.static_range(PARTS):
        part = x.to(PART)
        widened = part.to(tl.float32)
        x -= widened
        product = tl.dot(widened if WIDEN else part, matrix, product, input_precision="ieee")
    return product


@triton.jit
def _to_e4m3(x):
    """Return the bits of the nearest E4M3, of two the even, as int32; |x| <= 448."""
    bits = _bits(x)
    size = bits & 0x7FFFFFFF
    # Three bits of mantissa stay, and the exponent's bias falls from 127 to 7; below 2^-6 it is a multiple of 2^-9.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = _bits(size.to(tl.float32, bitcast=True) * 512.0 + ROUNDER) - ROUNDER_BITS
    return tl.where(size < (121 << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _from_e4m3(code):
    """Return the number that an E4M3 code stands for: int32 -> fp32."""
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return (_bits(x) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _code(x, PACKING: tl.constexpr, LARGEST: tl.constexpr):
    """Return the codes of values in units of their scale, as int32; 0 for a NaN."""
    tl.static_assert(PACKING == "integers" or PACKING == "e4m3", "a packing that no kernel knows")
    x = tl.where(x == x, x, 0.0)
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    if PACKING == "e4m3":
        return _to_e4m3(x)
    return _bits(x + ROUNDER) - ROUNDER_BITS


@triton.jit
def _number(code, PACKING: tl.constexpr, BITS: tl.constexpr):
    """Return the numbers that fields of BITS bits stand for: int32 -> fp32."""
    tl.static_assert(PACKING == "integers" or PACKING == "e4m3", "a packing that no kernel knows")
    if PACKING == "e4m3":
        return _from_e4m3(code)
    if BITS == 8:
        return ((code ^ 128) - 128).to(tl.float32)
    return (code - (1 << (BITS - 1))).to(tl.float32)


@triton.jit
def _pair(low, high, BITS: tl.constexpr):
    """Put two codes of fewer than 8 bits, or two such pairs, into one field; each becomes positive by its offset."""
    return low + (1 << (BITS - 1)) + ((high + (1 << (BITS - 1))) << BITS)


@triton.jit
def _halves(x):
    """Split (rows, 64) into its columns below 32 and the others."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def _whole(low, high):
    """Join two of (rows, 32) to (rows, 64)."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (low.shape[0], 2 * low.shape[1]))


@triton.jit
def _at_byte(codes, rows, BYTE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Point to byte BYTE, and WORDS - 1 following ones, of the codes of the blocks `rows`."""
    return codes + rows[:, None] * (BLOCK // 8 * BITS) + (BYTE + tl.arange(0, WORDS)[None, :])


@triton.jit
def _store_codes(codes, rows, low, high, used, BITS: tl.constexpr):
    """Write the codes (rows, 64) of columns below 64 and above, int32, as integers of BITS bits; see `formats`."""
    tl.static_assert(BITS == 2 or BITS == 4 or BITS == 6 or BITS == 8, "integers have 2, 4, 6 or 8 bits")
    if BITS == 8:
        tl.store(_at_byte(codes, rows, 0, BITS, HALF), low.to(tl.uint8), mask=used)
        tl.store(_at_byte(codes, rows, HALF, BITS, HALF), high.to(tl.uint8), mask=used)
    if BITS == 4:
        tl.store(_at_byte(codes, rows, 0, BITS, HALF), _pair(low, high, BITS).to(tl.uint8), mask=used)
    if BITS == 2 or BITS == 6:
        first, second = _halves(low)
        third, fourth = _halves(high)
        words = _pair(first, second, BITS) + (_pair(third, fourth, BITS) << (2 * BITS))
        for byte in tl.static_range(BITS // 2):
            at = _at_byte(codes, rows, byte * QUARTER, BITS, QUARTER)
            tl.store(at, (words >> (8 * byte)).to(tl.uint8), mask=used)


@triton.jit
def _load_numbers(codes, rows, used, PACKING: tl.constexpr, BITS: tl.constexpr):
    """Return the numbers of the blocks `rows` of a message in units of their scales: two of (rows, 64)."""
    tl.static_assert(BITS == 2 or BITS == 4 or BITS == 6 or BITS == 8, "integers have 2, 4, 6 or 8 bits")
    if BITS == 8:
        low = tl.load(_at_byte(codes, rows, 0, BITS, HALF), mask=used, other=0).to(tl.int32)
        high = tl.load(_at_byte(codes, rows, HALF, BITS, HALF), mask=used, other=0).to(tl.int32)
    if BITS == 4:
        both = tl.load(_at_byte(codes, rows, 0, BITS, HALF), mask=used, other=0).to(tl.int32)
        low, high = both & 15, both >> 4
    if BITS == 2 or BITS == 6:
        words = tl.zeros((rows.shape[0], QUARTER), tl.int32)
        for byte in tl.static_range(BITS // 2):
            at = _at_byte(codes, rows, byte * QUARTER, BITS, QUARTER)
            words |= tl.load(at, mask=used, other=0).to(tl.int32) << (8 * byte)
        mask: tl.constexpr = (1 << BITS) - 1
        low = _whole(words & mask, (words >> BITS) & mask)
        high = _whole((words >> (2 * BITS)) & mask, words >> (3 * BITS))
    return _number(low, PACKING, BITS), _number(high, PACKING, BITS)


@triton.jit(do_not_specialize=["blocks", "scales_stride"], do_not_specialize_on_alignment=["table"])
def encode_blocks(
    values, table, signs, scales, codes, scales_stride, codes_stride, blocks,
    PACKING: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr, ROTATED: tl.constexpr, INVERSE: tl.constexpr,
    GAIN: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, WIDEN: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write scales (as int16) and codes (uint8) of the blocks that `table` finds in `values`. Grid: (blocks / ROWS, N).

    The largest is found among bits: those of a NaN are above those of infinity. INVERSE: 1 over GAIN times the largest
    code; GAIN: the factor by which the rotation, which is not normalised, lengthens a block.
    """
    rows, message = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    start, length = _place(table, message, rows, blocks, ALIGN)
    low_columns, high_columns = tl.arange(0, HALF), tl.arange(0, HALF) + HALF
    low_at, high_at = start[:, None] + low_columns[None, :], start[:, None] + high_columns[None, :]
    low = tl.load(values + low_at, mask=low_columns[None, :] < length[:, None], other=0.0).to(tl.float32)
    high = tl.load(values + high_at, mask=high_columns[None, :] < length[:, None], other=0.0).to(tl.float32)
    if ROTATED:
        # Of 128 columns: the sum and the difference of what 64 make of each half.
        low = _hadamard(low * tl.load(signs + low_columns)[None, :], PARTS, PART, WIDEN)
        high = _hadamard(high * tl.load(signs + high_columns)[None, :], PARTS, PART, WIDEN)
        low, high = low + high, low - high
    low_peak, high_peak = tl.max(_bits(low) & 0x7FFFFFFF, axis=1), tl.max(_bits(high) & 0x7FFFFFFF, axis=1)
    peak = tl.maximum(low_peak, high_peak).to(tl.float32, bitcast=True)
    scale = _bf16_bits(peak * INVERSE)
    tl.store(scales + message.to(tl.int64) * scales_stride + rows, scale.to(tl.int16), mask=length > 0)
    unit = (scale << 16).to(tl.float32, bitcast=True)[:, None] * GAIN
    low_code = _code(tl.div_rn(low, unit), PACKING, LARGEST)
    high_code = _code(tl.div_rn(high, unit), PACKING, LARGEST)
    first = codes + message.to(tl.int64) * codes_stride
    _store_codes(first, rows.to(tl.int64), low_code, high_code, length[:, None] > 0, BITS)


@triton.jit
def _scale(scales, rows, used):
    bits = tl.load(scales + rows, mask=used, other=0).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)[:, None]


@triton.jit(do_not_specialize=["blocks", "senders", "scales_stride"], do_not_specialize_on_alignment=["table"])
def add_up_blocks(
    scales, codes, table, signs, out, scales_stride, codes_stride, blocks, senders,
    PACKING: tl.constexpr, BITS: tl.constexpr, ROTATED: tl.constexpr, ALONE: tl.constexpr, WIDEN: tl.constexpr,
    BF16: tl.constexpr, ONTO: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write to `out` the sum of the values of `senders`. Grid: (blocks / ROWS, 1); ALONE, of one: (blocks / ROWS, N).

    ONTO: add it to what is there.

    With one sender the scale comes after the rotation, whose sums of codes are exact.
    """
    rows, message = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    start, length = _place(table, message, rows, blocks, ALIGN)
    rows = rows.to(tl.int64)
    used = length > 0
    low_columns, high_columns = tl.arange(0, HALF), tl.arange(0, HALF) + HALF
    if ALONE:
        low, high = _load_numbers(codes + message.to(tl.int64) * codes_stride, rows, used[:, None], PACKING, BITS)
    else:
        low, high = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
        for _ in range(0, senders):
            sent_low, sent_high = _load_numbers(codes, rows, used[:, None], PACKING, BITS)
            scale = _scale(scales, rows, used)
            low += sent_low * scale
            high += sent_high * scale
            codes += codes_stride
            scales += scales_stride
    if ROTATED:
        if ALONE:
            low, high = _hadamard(low, 1, tl.float16, WIDEN), _hadamard(high, 1, tl.float16, WIDEN)
        else:
            low, high = _hadamard(low, 3, tl.bfloat16, WIDEN), _hadamard(high, 3, tl.bfloat16, WIDEN)
        total = low + high
        high = (low - high) * tl.load(signs + high_columns)[None, :]
        low = total * tl.load(signs + low_columns)[None, :]
    if ALONE:
        scale = _scale(scales + message.to(tl.int64) * scales_stride, rows, used)
        low *= scale
        high *= scale
    low_at, high_at = start[:, None] + low_columns[None, :], start[:, None] + high_columns[None, :]
    _store(out + low_at, low, low_columns[None, :] < length[:, None], BF16, ONTO)
    _store(out + high_at, high, high_columns[None, :] < length[:, None], BF16, ONTO)


@triton.jit
def _chunk(table, slots, message, chunks, ROWS: tl.constexpr):
    """Return the places of a program's dense values in the tensor and in the section, and which of them are there."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    start, length = _place(table, message, rows, chunks, 1)
    slot = tl.load(slots + message.to(tl.int64) * chunks + rows, mask=length > 0, other=0)
    return start[:, None] + columns[None, :], slot[:, None] + columns[None, :], columns[None, :] < length[:, None]


@triton.jit(do_not_specialize=["chunks", "stride"], do_not_specialize_on_alignment=["table", "slots"])
def copy_values(values, table, slots, dense, stride, chunks, ROWS: tl.constexpr):
    """Copy dense values to the messages: chunks (N, chunks) of up to 128, each from its place in `table` to that in
    `slots`. Grid: (chunks / ROWS, N)."""
    message = tl.program_id(1)
    at, slot, mask = _chunk(table, slots, message, chunks, ROWS)
    tl.store(dense + message.to(tl.int64) * stride + slot, tl.load(values + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["chunks", "senders", "stride"], do_not_specialize_on_alignment=["table", "slots"])
def add_up_values(
    dense, table, slots, out, stride, chunks, senders, BF16: tl.constexpr, ONTO: tl.constexpr, ROWS: tl.constexpr
):
    """Write to `out`, or add ONTO it, sums of such chunks over `senders`. Grid: (chunks / ROWS, 1), of one (.., N)."""
    message = tl.program_id(1)
    at, slot, mask = _chunk(table, slots, message, chunks, ROWS)
    sent = dense + message.to(tl.int64) * stride + slot
    total = tl.load(sent, mask=mask, other=0.0).to(tl.float32)
    for _ in range(1, senders):
        sent += stride
        total += tl.load(sent, mask=mask, other=0.0).to(tl.float32)
    _store(out + at, total, mask, BF16, ONTO)
