"""Triton kernels of the block formats; `blocks` holds what calls them. Needs triton to be imported.

Conventions of all kernels: a block is a row of a tile, in two halves of 64 columns, `low` and `high`. `table` says of
each block of each message, (N, blocks), where its values lie: start * 256 + length, both divisible by ALIGN; 0 where
there is no such block. `codes` and `scales` are pointers to the first message's sections, `strides` the elements from
one message to the next. Equal inputs give equal bits: no atomics, one order of sums.

E4M3 and bf16 are made of integers, so that every GPU, and triton's interpreter, round alike.
"""

import triton
import triton.language as tl

__all__ = ["add_up_blocks", "add_up_values", "copy_values", "encode_blocks"]

BLOCK = tl.constexpr(128)
HALF = tl.constexpr(64)
ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""fp32 numbers of this size are integers: what is added to it is rounded to the nearest one, of two to the even."""

ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _bf16_bits(x):
    """fp32 rounded to the nearest bf16, of two to the even, as int32. A NaN stays one."""
    bits = _bits(x)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@triton.jit
def _store(pointers, x, mask, BF16: tl.constexpr):
    """BF16: the pointers are to int16, which stand for bf16."""
    if BF16:
        tl.store(pointers, _bf16_bits(x).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _place(table, message, rows, blocks, ALIGN: tl.constexpr):
    """Starts and lengths of a message's blocks `rows`; a length of 0 where there is none."""
    entry = tl.load(table + message.to(tl.int64) * blocks + rows, mask=rows < blocks, other=0)
    return tl.multiple_of(entry >> 8, ALIGN), tl.multiple_of((entry & 255).to(tl.int32), ALIGN)


@triton.jit
def _hadamard(x, PARTS: tl.constexpr, PART: tl.constexpr, WIDEN: tl.constexpr):
    """X H, (rows, 64), for the Hadamard matrix of 64 x 64, of entries (-1)^(bits that i and j have in common).

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
    """The bits of the nearest E4M3, of two the even, as int32; |x| <= 448."""
    bits = _bits(x)
    size = bits & 0x7FFFFFFF
    # Three bits of mantissa stay, and the exponent's bias falls from 127 to 7; below 2^-6 it is a multiple of 2^-9.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = _bits(size.to(tl.float32, bitcast=True) * 512.0 + ROUNDER) - ROUNDER_BITS
    return tl.where(size < (121 << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _from_e4m3(code):
    """int32 -> fp32."""
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return (_bits(x) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _code(x, FORMAT: tl.constexpr):
    """The codes of values in units of their scale, as int32; 0 of a NaN."""
    largest: tl.constexpr = 448.0 if FORMAT == "fp8" else (127.0 if FORMAT == "int8" else 7.0)
    x = tl.where(x == x, x, 0.0)
    x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))
    if FORMAT == "fp8":
        return _to_e4m3(x)
    return _bits(x + ROUNDER) - ROUNDER_BITS


@triton.jit(do_not_specialize=["blocks", "scales_stride"], do_not_specialize_on_alignment=["table"])
def encode_blocks(
    values,
    table,
    signs,
    scales,
    codes,
    scales_stride,
    codes_stride,
    blocks,
    FORMAT: tl.constexpr,
    ROTATED: tl.constexpr,
    INVERSE: tl.constexpr,
    GAIN: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    WIDEN: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Scales (as int16) and codes (uint8) of the blocks that `table` finds in `values`. Grid: (blocks / ROWS, N).

    The largest is found among bits: those of a NaN are above those of infinity. INVERSE: 1 over GAIN times the largest
    code, GAIN: what the rotation multiplies by.
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
    low_code, high_code = _code(tl.div_rn(low, unit), FORMAT), _code(tl.div_rn(high, unit), FORMAT)
    first = codes + message.to(tl.int64) * codes_stride
    used = length[:, None] > 0
    if FORMAT == "int4":
        at = rows.to(tl.int64)[:, None] * HALF + low_columns[None, :]
        tl.store(first + at, (low_code + 8 + ((high_code + 8) << 4)).to(tl.uint8), mask=used)
    else:
        at = rows.to(tl.int64)[:, None] * BLOCK + low_columns[None, :]
        tl.store(first + at, (low_code & 255).to(tl.uint8), mask=used)
        tl.store(first + at + HALF, (high_code & 255).to(tl.uint8), mask=used)


@triton.jit
def _number(code, FORMAT: tl.constexpr):
    """int32 -> fp32."""
    if FORMAT == "fp8":
        return _from_e4m3(code)
    return ((code ^ 128) - 128).to(tl.float32)


@triton.jit
def _numbers(codes, rows, used, FORMAT: tl.constexpr):
    """What the codes of a message's blocks `rows` stand for, in units of their scales: two of (rows, 64)."""
    columns = tl.arange(0, HALF)[None, :]
    if FORMAT == "int4":
        both = tl.load(codes + rows[:, None] * HALF + columns, mask=used, other=0).to(tl.int32)
        low, high = ((both & 15) - 8).to(tl.float32), ((both >> 4) - 8).to(tl.float32)
    else:
        at = codes + rows[:, None] * BLOCK + columns
        low = _number(tl.load(at, mask=used, other=0).to(tl.int32), FORMAT)
        high = _number(tl.load(at + HALF, mask=used, other=0).to(tl.int32), FORMAT)
    return low, high


@triton.jit
def _scale(scales, rows, used):
    bits = tl.load(scales + rows, mask=used, other=0).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)[:, None]


@triton.jit(do_not_specialize=["blocks", "senders", "scales_stride"], do_not_specialize_on_alignment=["table"])
def add_up_blocks(
    scales,
    codes,
    table,
    signs,
    out,
    scales_stride,
    codes_stride,
    blocks,
    senders,
    FORMAT: tl.constexpr,
    ROTATED: tl.constexpr,
    ALONE: tl.constexpr,
    WIDEN: tl.constexpr,
    BF16: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes to `out` the sum of what `senders` sent. Grid: (blocks / ROWS, 1); ALONE, of one: (blocks / ROWS, N).

    Of one the scale comes after the rotation, whose sums of codes are exact.
    """
    rows, message = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    start, length = _place(table, message, rows, blocks, ALIGN)
    rows = rows.to(tl.int64)
    used = length > 0
    low_columns, high_columns = tl.arange(0, HALF), tl.arange(0, HALF) + HALF
    if ALONE:
        low, high = _numbers(codes + message.to(tl.int64) * codes_stride, rows, used[:, None], FORMAT)
    else:
        low, high = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
        for _ in range(0, senders):
            sent_low, sent_high = _numbers(codes, rows, used[:, None], FORMAT)
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
    _store(out + low_at, low, low_columns[None, :] < length[:, None], BF16)
    _store(out + high_at, high, high_columns[None, :] < length[:, None], BF16)


@triton.jit
def _chunk(table, slots, message, chunks, ROWS: tl.constexpr):
    """Of a program's chunks of dense values: where they lie in the tensor, where in the section, which are there."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    start, length = _place(table, message, rows, chunks, 1)
    slot = tl.load(slots + message.to(tl.int64) * chunks + rows, mask=length > 0, other=0)
    return start[:, None] + columns[None, :], slot[:, None] + columns[None, :], columns[None, :] < length[:, None]


@triton.jit(do_not_specialize=["chunks", "stride"], do_not_specialize_on_alignment=["table", "slots"])
def copy_values(values, table, slots, dense, stride, chunks, ROWS: tl.constexpr):
    """What is sent as it is, to the messages' dense sections: chunks (N, chunks) of up to 128, each from where `table`
    has it to where `slots` has it. Grid: (chunks / ROWS, N)."""
    message = tl.program_id(1)
    at, slot, mask = _chunk(table, slots, message, chunks, ROWS)
    tl.store(dense + message.to(tl.int64) * stride + slot, tl.load(values + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["chunks", "senders", "stride"], do_not_specialize_on_alignment=["table", "slots"])
def add_up_values(dense, table, slots, out, stride, chunks, senders, BF16: tl.constexpr, ROWS: tl.constexpr):
    """Writes to `out` the sums of such chunks over `senders`. Grid: (chunks / ROWS, 1), of one sender (.., N)."""
    message = tl.program_id(1)
    at, slot, mask = _chunk(table, slots, message, chunks, ROWS)
    sent = dense + message.to(tl.int64) * stride + slot
    total = tl.load(sent, mask=mask, other=0.0).to(tl.float32)
    for _ in range(1, senders):
        sent += stride
        total += tl.load(sent, mask=mask, other=0.0).to(tl.float32)
    _store(out + at, total, mask, BF16)
