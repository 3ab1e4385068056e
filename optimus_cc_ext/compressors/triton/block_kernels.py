"""Triton kernels of the block formats; `blocks` calls them. Needs triton to be imported.

Conventions of all kernels: a block is a row of four tiles of 32 columns, its quarters. A program works on one run of
one message: up to ROWS blocks of adjacent values. `table` has the runs of each message, (N, runs, 2): the start of the
values, and place * 2^14 + length, where the place is the number of the first block; start and length are divisible by
ALIGN, and a length of 0 means that there is no such run. Without a table, messages are the rows of a matrix, one after
the other, of `per_row` whole blocks each, `blocks` in all. `codes` and `scales` are pointers to the first message's
sections, `strides` the elements from one message to the next. WIDEN: triton's interpreter neither multiplies bf16 nor
rounds to it, so the kernels compute the same bits in another way. Equal inputs give equal bits, because there are no
atomics and sums have one order.

A block is rotated by the Hadamard matrix of 32 x 32, quarter by quarter, and by additions of the four results, because
128 x 128 = (4 x 4) x (32 x 32): this takes a fourth of the products, and a matrix that fits the registers.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
QUARTER = tl.constexpr(32)
ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Size at which fp32 numbers are integers: adding it to a number rounds the number to the nearest integer, ties to
even.
"""

ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _bf16_bits(x):
    """Round fp32 to the nearest bf16, ties to even, and return its bits as int32. A NaN stays a NaN."""
    bits = _bits(x)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@triton.jit
def _rounded(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """Round fp32 to the nearest number of `dtype`, ties to even."""
    if WIDEN and dtype == tl.bfloat16:
        x = _bf16_bits(x).to(tl.int16).to(dtype, bitcast=True)
    return x.to(dtype)


@triton.jit
def _store(pointers, x, mask, ONTO: tl.constexpr, WIDEN: tl.constexpr):
    """Store x in the dtype of the pointers. ONTO: add x, rounded to that dtype, to the stored values."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if ONTO:
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + _rounded(x, dtype, WIDEN).to(tl.float32)
    tl.store(pointers, _rounded(x, dtype, WIDEN), mask=mask)


@triton.jit
def _run(table, message, ALIGN: tl.constexpr, ROWS: tl.constexpr):
    """Return starts and lengths of the blocks of this program's run, a length of 0 if there is no such block, and the
    run's place.
    """
    run = table + 2 * (message.to(tl.int64) * tl.num_programs(0) + tl.program_id(0))
    place, first = tl.load(run + 1), tl.arange(0, ROWS) * BLOCK
    length = tl.minimum(tl.maximum((place & 16383).to(tl.int32) - first, 0), BLOCK)
    return tl.multiple_of(tl.load(run) + first, ALIGN), tl.multiple_of(length, ALIGN), place >> 14


@triton.jit
def _run_of_rows(blocks, per_row, ROWS: tl.constexpr):
    """Return starts and lengths of this program's blocks of all rows, the row of each block, and its place in the
    row.
    """
    numbers = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start, length = numbers.to(tl.int64) * BLOCK, tl.where(numbers < blocks, BLOCK, 0)
    return tl.multiple_of(start, BLOCK), tl.multiple_of(length, BLOCK), numbers // per_row, numbers % per_row


@triton.jit
def _times(x, matrices, WHICH: tl.constexpr, WIDEN: tl.constexpr):
    """Return X M, (rows, 32) in fp32, for matrix WHICH of `matrices` (4, 32, 32), whose entries are 1 and -1.

    Tensor cores multiply in the dtype of the matrices. In 16 bits, X must be exact. TF32 has 11 of fp32's 24 bits: X is
    the sum of its upper 11 bits and the rest, of which a product loses at most the last two, 2^-21 of X. Products with
    1 and -1 are exact. A tensor core that flushes TF32's subnormal numbers to 0 loses values below 2^-126.
    """
    i, j = tl.arange(0, QUARTER)[:, None], tl.arange(0, QUARTER)[None, :]
    matrix = tl.load(matrices + WHICH * QUARTER * QUARTER + i * QUARTER + j)
    if matrix.dtype == tl.float32:
        upper = _upper_bits(x)
        rest = x - upper
        if WIDEN:
            rest = _upper_bits(rest)
        product = tl.dot(upper, matrix, tl.dot(rest, matrix, input_precision="tf32"), input_precision="tf32")
    else:
        x = x.to(matrix.dtype)
        if WIDEN:
            x, matrix = x.to(tl.float32), matrix.to(tl.float32)
        product = tl.dot(x, matrix)
    return product


@triton.jit
def _upper_bits(x):
    """Return the bits of fp32 that TF32 keeps."""
    return (_bits(x) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _field(x, unit, BITS: tl.constexpr, LARGEST: tl.constexpr, ROTATED: tl.constexpr):
    """Return the fields of BITS bits, as int32, that stand for values in units of their scale.

    Rotated values are rounded sums, so a reciprocal's last bit matters no more than theirs. A rotated block's unit is 0
    or at least 2^-126, 128 times a bf16, so that its reciprocal is finite.
    """
    if ROTATED:
        x *= tl.where(unit > 0, tl.div_rn(1.0, unit), 0.0)
    else:
        x = tl.div_rn(x, unit)
        x = tl.where(x == x, x, 0.0)
    x = tl.maximum(tl.minimum(x, LARGEST), -LARGEST)
    # A field that is narrower than a byte has no sign.
    offset: tl.constexpr = 0 if BITS == 8 else 1 << (BITS - 1)
    return _bits(x + (ROUNDER + offset)) - ROUNDER_BITS


@triton.jit
def _number(code, BITS: tl.constexpr):
    """Return the numbers that fields of BITS bits stand for: int32 -> fp32."""
    offset: tl.constexpr = 1 << (BITS - 1)
    if BITS == 8:  # two's complement
        code ^= offset
    # The number is made from the code's bits: converting such small integers takes the compiler eight times as many
    # instructions.
    return (code | ROUNDER_BITS).to(tl.float32, bitcast=True) - (ROUNDER + offset)


@triton.jit
def _butterflies(a, b, c, d):
    """Return four sums of four tensors, with the signs of the rows of the 4 x 4 Hadamard matrix."""
    a, b, c, d = a + b, a - b, c + d, c - d
    return a + c, b + d, a - c, b - d


@triton.jit
def _quarter(start, length, WHICH: tl.constexpr):
    """Return the places of quarter WHICH of each block in the tensor, and a mask of the places that exist."""
    columns = WHICH * QUARTER + tl.arange(0, QUARTER)
    return start[:, None] + columns[None, :], columns[None, :] < length[:, None]


@triton.jit
def _codes_of(codes, message, rows, stride, BITS: tl.constexpr):
    """Return pointers to the codes of the blocks `rows` of a message."""
    return codes + message.to(tl.int64) * stride + rows.to(tl.int64) * (BLOCK // 8 * BITS)


@triton.jit
def _at_byte(codes, FIRST: tl.constexpr):
    """Return pointers to 32 bytes of each block's codes, from byte 32 * FIRST on."""
    return codes[:, None] + (FIRST * QUARTER + tl.arange(0, QUARTER)[None, :])


@triton.jit
def _store_codes(codes, a, b, c, d, used, BITS: tl.constexpr):
    """Write the fields of four quarters, (rows, 32) int32 each, as integers of BITS bits, in the packing of
    `formats`.
    """
    tl.static_assert(BITS == 2 or BITS == 4 or BITS == 6 or BITS == 8, "integers have 2, 4, 6 or 8 bits")
    if BITS == 8:
        tl.store(_at_byte(codes, 0), a.to(tl.uint8), mask=used)
        tl.store(_at_byte(codes, 1), b.to(tl.uint8), mask=used)
        tl.store(_at_byte(codes, 2), c.to(tl.uint8), mask=used)
        tl.store(_at_byte(codes, 3), d.to(tl.uint8), mask=used)
    if BITS == 4:
        tl.store(_at_byte(codes, 0), (a + (c << 4)).to(tl.uint8), mask=used)
        tl.store(_at_byte(codes, 1), (b + (d << 4)).to(tl.uint8), mask=used)
    if BITS == 2 or BITS == 6:
        words = a + (b << BITS) + (c << (2 * BITS)) + (d << (3 * BITS))
        for byte in tl.static_range(BITS // 2):
            tl.store(_at_byte(codes, byte), (words >> (8 * byte)).to(tl.uint8), mask=used)


@triton.jit
def _load_numbers(codes, used, BITS: tl.constexpr):
    """Return the numbers of blocks, whose codes are at `codes`, in units of their scales: four tensors (rows, 32)."""
    tl.static_assert(BITS == 2 or BITS == 4 or BITS == 6 or BITS == 8, "integers have 2, 4, 6 or 8 bits")
    if BITS == 8:
        a, b = _load_byte(codes, 0, used), _load_byte(codes, 1, used)
        c, d = _load_byte(codes, 2, used), _load_byte(codes, 3, used)
    if BITS == 4:
        first, second = _load_byte(codes, 0, used), _load_byte(codes, 1, used)
        a, b, c, d = first & 15, second & 15, first >> 4, second >> 4
    if BITS == 2 or BITS == 6:
        words = _load_byte(codes, 0, used)
        for byte in tl.static_range(1, BITS // 2):
            words |= _load_byte(codes, byte, used) << (8 * byte)
        mask: tl.constexpr = (1 << BITS) - 1
        a, b, c, d = words & mask, (words >> BITS) & mask, (words >> (2 * BITS)) & mask, words >> (3 * BITS)
    return (
        _number(a, BITS), _number(b, BITS), _number(c, BITS), _number(d, BITS)
    )  # fmt: skip


@triton.jit
def _load_byte(codes, FIRST: tl.constexpr, used):
    return tl.load(_at_byte(codes, FIRST), mask=used, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["blocks", "per_row", "scales_stride"], do_not_specialize_on_alignment=["table"])
def encode_blocks(
    values, table, rotations, scales, codes, scales_stride, codes_stride, blocks, per_row,
    BITS: tl.constexpr, LARGEST: tl.constexpr, ROTATED: tl.constexpr, INVERSE: tl.constexpr,
    GAIN: tl.constexpr, WIDEN: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write scales (as int16) and codes (uint8) of the blocks that `table` finds in `values`. Grid: (runs, N); without
    a table (blocks / ROWS, 1).

    INVERSE: 1 over GAIN times the largest code; GAIN: the factor by which the rotation, which is not normalised,
    lengthens a block. `rotations` are the matrices of `_times`; matrix h has rows 32 h to 32 h + 31 of diag(s) H.
    """
    if table is None:
        start, length, message, rows = _run_of_rows(blocks, per_row, ROWS)
    else:
        message = tl.program_id(1)
        start, length, place = _run(table, message, ALIGN, ROWS)
        rows = place.to(tl.int32) + tl.arange(0, ROWS)
    a, b = _load_quarter(values, start, length, 0), _load_quarter(values, start, length, 1)
    c, d = _load_quarter(values, start, length, 2), _load_quarter(values, start, length, 3)
    if ROTATED:
        a, b = _times(a, rotations, 0, WIDEN), _times(b, rotations, 1, WIDEN)
        c, d = _times(c, rotations, 2, WIDEN), _times(d, rotations, 3, WIDEN)
        a, b, c, d = _butterflies(a, b, c, d)
    else:
        a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    scale = _bf16_bits(_peak(a, b, c, d, ROTATED) * INVERSE)
    tl.store(scales + message.to(tl.int64) * scales_stride + rows, scale.to(tl.int16), mask=length > 0)
    unit = (scale << 16).to(tl.float32, bitcast=True)[:, None] * GAIN
    a, b = _field(a, unit, BITS, LARGEST, ROTATED), _field(b, unit, BITS, LARGEST, ROTATED)
    c, d = _field(c, unit, BITS, LARGEST, ROTATED), _field(d, unit, BITS, LARGEST, ROTATED)
    _store_codes(_codes_of(codes, message, rows, codes_stride, BITS), a, b, c, d, length[:, None] > 0, BITS)


@triton.jit
def _load_quarter(values, start, length, WHICH: tl.constexpr):
    at, mask = _quarter(start, length, WHICH)
    return tl.load(values + at, mask=mask, other=0.0)


@triton.jit
def _peak(a, b, c, d, ROTATED: tl.constexpr):
    """Return the largest absolute value of each row; NaN or infinity if the row has one."""
    if ROTATED:  # A maximum ignores NaNs, but the rotation makes all values of a block NaN if one is.
        largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        return tl.max(largest, axis=1)
    else:
        # Values are compared as bits, in which NaNs are larger than infinity.
        first = tl.maximum(_bits(a) & 0x7FFFFFFF, _bits(b) & 0x7FFFFFFF)
        second = tl.maximum(_bits(c) & 0x7FFFFFFF, _bits(d) & 0x7FFFFFFF)
        return tl.max(tl.maximum(first, second), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _scale(scales, used):
    bits = tl.load(scales, mask=used, other=0).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _within_range(x, dtype: tl.constexpr):
    """Replace finite values that would round to fp16's infinity by the largest number of fp16."""
    if dtype == tl.float16:
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -65504.0), 65504.0), x)
    return x


@triton.jit(
    do_not_specialize=["blocks", "per_row", "senders", "scales_stride"], do_not_specialize_on_alignment=["table"]
)
def add_up_blocks(
    scales, codes, table, rotations, out, scales_stride, codes_stride, blocks, per_row, senders,
    BITS: tl.constexpr, ROTATED: tl.constexpr, ALONE: tl.constexpr, WIDEN: tl.constexpr,
    ONTO: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the sum of the values of `senders` to `out`. Grid: (runs, 1); with ALONE, for one sender: (runs, N);
    without a table (blocks / ROWS, 1).

    ONTO: add the sum to the values in `out`. With one sender the scale is applied after the rotation, whose sums of
    codes are exact.
    """
    if table is None:
        start, length, message, rows = _run_of_rows(blocks, per_row, ROWS)
    else:
        message = tl.program_id(1)
        start, length, place = _run(table, message, ALIGN, ROWS)
        rows = place.to(tl.int32) + tl.arange(0, ROWS)
    used = length > 0
    scales += message.to(tl.int64) * scales_stride + rows
    codes = _codes_of(codes, message, rows, codes_stride, BITS)
    if ALONE:
        scale = _scale(scales, used)
        a, b, c, d = _load_numbers(codes, used[:, None], BITS)
    else:
        a, b = tl.zeros((ROWS, QUARTER), tl.float32), tl.zeros((ROWS, QUARTER), tl.float32)
        c, d = tl.zeros((ROWS, QUARTER), tl.float32), tl.zeros((ROWS, QUARTER), tl.float32)
        for _ in range(0, senders):
            sent_a, sent_b, sent_c, sent_d = _load_numbers(codes, used[:, None], BITS)
            scale = _scale(scales, used)
            a += sent_a * scale
            b += sent_b * scale
            c += sent_c * scale
            d += sent_d * scale
            codes += codes_stride
            scales += scales_stride
    if ROTATED:
        a, b, c, d = _butterflies(a, b, c, d)
        a, b = _times(a, rotations, 0, WIDEN), _times(b, rotations, 1, WIDEN)
        c, d = _times(c, rotations, 2, WIDEN), _times(d, rotations, 3, WIDEN)
    if ALONE:
        dtype: tl.constexpr = out.dtype.element_ty
        a, b = _within_range(a * scale, dtype), _within_range(b * scale, dtype)
        c, d = _within_range(c * scale, dtype), _within_range(d * scale, dtype)
    _store_quarter(out, start, length, 0, a, ONTO, WIDEN)
    _store_quarter(out, start, length, 1, b, ONTO, WIDEN)
    _store_quarter(out, start, length, 2, c, ONTO, WIDEN)
    _store_quarter(out, start, length, 3, d, ONTO, WIDEN)


@triton.jit
def _store_quarter(out, start, length, WHICH: tl.constexpr, x, ONTO: tl.constexpr, WIDEN: tl.constexpr):
    at, mask = _quarter(start, length, WHICH)
    _store(out + at, x, mask, ONTO, WIDEN)


@triton.jit
def _dense_run(table, message, ROWS: tl.constexpr):
    """Return the places of a program's dense values in the tensor and in the section, and a mask of those that
    exist.
    """
    start, length, place = _run(table, message, 1, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    return start[:, None] + columns, place + tl.arange(0, ROWS)[:, None] * BLOCK + columns, columns < length[:, None]


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["table"])
def copy_values(values, table, dense, stride, ROWS: tl.constexpr):
    """Copy dense values to the messages. Grid: (runs, N); the place of a run is that in the message's dense section."""
    message = tl.program_id(1)
    at, slot, mask = _dense_run(table, message, ROWS)
    tl.store(dense + message.to(tl.int64) * stride + slot, tl.load(values + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["senders", "stride"], do_not_specialize_on_alignment=["table"])
def add_up_values(dense, table, out, stride, senders, WIDEN: tl.constexpr, ONTO: tl.constexpr, ROWS: tl.constexpr):
    """Write the sums of dense runs over `senders` to `out`, or with ONTO add them. Grid: (runs, 1); one sender:
    (runs, N).
    """
    message = tl.program_id(1)
    at, slot, mask = _dense_run(table, message, ROWS)
    sent = dense + message.to(tl.int64) * stride + slot
    total = tl.load(sent, mask=mask, other=0.0).to(tl.float32)
    for _ in range(1, senders):
        sent += stride
        total += tl.load(sent, mask=mask, other=0.0).to(tl.float32)
    _store(out + at, total, mask, ONTO, WIDEN)
