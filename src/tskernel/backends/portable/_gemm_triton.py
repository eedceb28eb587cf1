# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""Matrix products in Triton, ``a @ b^T`` of dense or quantized operands: one device program for mm, bmm and grouped_mm.

Numbers are read as they are stored and become the operands of matrix instructions in registers. Scales are applied
where that is exact and cheapest: one per row or tensor behind the loop, one per block of K to the product of that
block (INTO 0), small groups to the operands themselves (INTO 1), where a power of two, or few bits more, change no
digit.

Source: block scales with products promoted per block: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, 3.3.2;
split K with a second program that joins: Osama et al. 2023, https://arxiv.org/abs/2301.03598, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tskernel.backends.lazy_triton import jit

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _fp4_value(code):
    """Return e2m1 codes as fp16: their bits moved to those of a number 2^-14 as large."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0


@jit
def _power(byte):
    """Return 2^(byte - 127) in fp32; byte 0 is a denormal number, 255 is NaN."""
    bits = byte.to(tl.int32) << 23
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@jit
def _as(x, TYPE: tl.constexpr):
    """Convert to a type by its name; "same" leaves what is."""
    if TYPE == "bf16":
        x = x.to(tl.bfloat16)
    elif TYPE == "fp16":
        x = x.to(tl.float16)
    elif TYPE == "fp32":
        x = x.to(tl.float32)
    return x


@jit
def _numbers(ptr, row, k0, k, row_step, column_step, KIND: tl.constexpr, TYPE: tl.constexpr, BLOCK_K: tl.constexpr,
             UNIT: tl.constexpr, TAIL: tl.constexpr):
    """Load columns k0 to k0 + BLOCK_K of rows (offsets of 64 bits) as TYPE; those from ``k`` on are 0.

    KIND: "plain" numbers, or "fp4" and "int4", two to a byte, low nibble first.
    """
    at = ptr + row[:, None] * row_step
    if KIND == "plain":
        column = k0 + tl.arange(0, BLOCK_K)
        at = at + (column if UNIT else column.to(tl.int64) * column_step)[None, :]
        x = tl.load(at, mask=(column < k)[None, :], other=0.0) if TAIL else tl.load(at)
        return _as(x, TYPE)
    else:
        column = k0 // 2 + tl.arange(0, BLOCK_K // 2)
        at = at + (column if UNIT else column.to(tl.int64) * column_step)[None, :]
        ZERO: tl.constexpr = 0x88 if KIND == "int4" else 0
        x = tl.load(at, mask=(2 * column < k)[None, :], other=ZERO) if TAIL else tl.load(at)
        x = x.to(tl.int32)
        if KIND == "fp4":
            low, high = _as(_fp4_value(x & 15), TYPE), _as(_fp4_value(x >> 4), TYPE)
        else:
            low, high = _as(((x & 15) - 8).to(tl.float32), TYPE), _as(((x >> 4) - 8).to(tl.float32), TYPE)
        return tl.reshape(tl.join(low, high), [x.shape[0], BLOCK_K])


@jit
def _scales(ptr, row, group, groups, row_step, column_step, POWER: tl.constexpr, TAIL: tl.constexpr):
    """Load the scales of rows (their places among the scales) and groups of K, in fp32; those that are not give 0."""
    at = ptr + row[:, None] * row_step + group.to(tl.int64)[None, :] * column_step
    if POWER:
        s = _power(tl.load(at, mask=(group < groups)[None, :], other=0) if TAIL else tl.load(at))
    else:
        s = (tl.load(at, mask=(group < groups)[None, :], other=0.0) if TAIL else tl.load(at)).to(tl.float32)
    return s


@jit
def _scaled(x, ptr, row, k0, groups, row_step, column_step, TYPE: tl.constexpr, GROUP: tl.constexpr,
            EACH: tl.constexpr, POWER: tl.constexpr, TAIL: tl.constexpr):
    """Multiply an operand by its scales of groups of K. EACH: of any size, looked up for each number."""
    BLOCK_K: tl.constexpr = x.shape[1]
    if EACH:
        group = (k0 + tl.arange(0, BLOCK_K)) // GROUP
        return _as(x.to(tl.float32) * _scales(ptr, row, group, groups, row_step, column_step, POWER, TAIL), TYPE)
    else:
        s = _scales(ptr, row, k0 // GROUP + tl.arange(0, BLOCK_K // GROUP), groups, row_step, column_step, POWER, TAIL)
        each = tl.reshape(x.to(tl.float32), [x.shape[0], BLOCK_K // GROUP, GROUP]) * s[:, :, None]
        return _as(tl.reshape(each, [x.shape[0], BLOCK_K]), TYPE)


@jit
def _block_scale(a_scale, b_scale, row, tall, group, groups, a_row, a_column, b_row, b_column, A_SCALED: tl.constexpr,
                 POWER: tl.constexpr, SWAP: tl.constexpr):
    """Return the factors of a block's product: of one group of K, for rows of both operands."""
    at = group + tl.arange(0, 1)
    s = tl.reshape(_scales(b_scale, tall, at, groups, b_row, b_column, POWER, False), [tall.shape[0]])
    s = s[:, None] if SWAP else s[None, :]
    if A_SCALED:
        t = tl.reshape(_scales(a_scale, row, at, groups, a_row, a_column, POWER, False), [row.shape[0]])
        s = s * (t[None, :] if SWAP else t[:, None])
    return s


@jit
def _product(x, w, acc, SWAP: tl.constexpr, ADD: tl.constexpr):
    """Return ``x @ w^T``, or its transpose, which puts many rows of w on the side of the matrix instruction's rows."""
    if SWAP:
        x, w = w, x
    if ADD:
        return tl.dot(x, tl.trans(w), acc=acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        return tl.dot(x, tl.trans(w), input_precision="ieee", out_dtype=acc.dtype)


@jit
def _in_bands(tiles_m, tiles_n, BAND: tl.constexpr):
    """Return which tile of rows and of columns this program has: BAND tiles of rows, column by column, and on."""
    program, width = tl.program_id(0), BAND * tiles_n
    first = program // width * BAND
    height = tl.minimum(tiles_m - first, BAND)
    return first + program % width % height, program % width // height


@jit
def _place(offsets, tile, rows, groups, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """Return group, first row and end of a tile of grouped rows; group ``groups`` has the rows behind the last end."""
    g = tl.arange(0, GROUPS)
    ends = tl.minimum(tl.maximum(tl.load(offsets + g, mask=g < groups, other=rows), 0), rows)
    starts = tl.minimum(tl.maximum(tl.load(offsets + g - 1, mask=(g > 0) & (g <= groups), other=0), 0), rows)
    starts = tl.where(g <= groups, starts, rows)
    last = tl.cumsum((tl.maximum(ends - starts, 0) + BLOCK_M - 1) // BLOCK_M, 0)
    group = tl.sum((last <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(g < group, last, 0), 0)
    start = tl.sum(tl.where(g == group, starts, 0), 0)
    end = tl.sum(tl.where(g == group, ends, 0), 0)
    return group, start + (tile - before) * BLOCK_M, end


@jit
def _finish(acc, row, column, batch, a_scale, b_scale, alpha, bias, a_scale_batch, a_scale_row, b_scale_batch,
            b_scale_row, alpha_batch, bias_batch, a_batch, HOW: tl.constexpr, A_SCALED: tl.constexpr,
            ALPHA: tl.constexpr, BIAS: tl.constexpr):
    """Apply the scales of rows or tensors, alpha and bias to sums in fp32; rows and columns are inside."""
    acc = acc.to(tl.float32)
    if HOW == "one":
        if A_SCALED:
            acc = acc * tl.load(a_scale + a_batch * a_scale_batch)
        acc = acc * tl.load(b_scale + batch * b_scale_batch)
    elif HOW == "row":
        if A_SCALED:
            acc = acc * tl.load(a_scale + a_batch * a_scale_batch + row * a_scale_row)[:, None]
        acc = acc * tl.load(b_scale + batch * b_scale_batch + column * b_scale_row)[None, :]
    if ALPHA:
        acc = acc * tl.load(alpha + batch * alpha_batch)
    if BIAS:
        acc = acc + tl.load(bias + batch * bias_batch + column).to(tl.float32)[None, :]
    return acc


@jit(do_not_specialize=("m", "tiles_m"))
def _multiply(
    a, b, out, a_scale, b_scale, alpha, bias, offsets, work, m, n, k, groups, tiles_m, tiles_n,
    a_batch, a_row, a_column, b_batch, b_row, b_column, out_batch, out_row,
    a_scale_batch, a_scale_row, a_scale_column, b_scale_batch, b_scale_row, b_scale_column, alpha_batch, bias_batch,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, TYPE: tl.constexpr, SUM: tl.constexpr, HOW: tl.constexpr,
    A_SCALED: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr, INTO: tl.constexpr, EACH: tl.constexpr,
    POWER: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
    SWAP: tl.constexpr, TAIL: tl.constexpr, BAND: tl.constexpr, A_UNIT: tl.constexpr, B_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One tile of the result, or one share of its K.

    HOW the scales lie: "none", "one", "row", or "group": one per GROUP of K, and TALL rows of b. GROUPS above 0: rows
    of ``a`` are grouped by ``offsets``, else matrices are batched. BAND: tiles of so many rows are taken column by
    column, so that what they read stays in the cache.
    """
    tile, column0 = _in_bands(tiles_m, tiles_n, BAND)
    batch, end, zero = tl.program_id(1).to(tl.int64), m, False
    a_index, row0 = batch, tile * BLOCK_M
    if GROUPS > 0:
        group, row0, end = _place(offsets, tile, m, groups, BLOCK_M, GROUPS)
        if group > groups or row0 >= end:
            return
        zero, batch, a_index = group == groups, tl.minimum(group, groups - 1).to(tl.int64), 0
    row = row0.to(tl.int64) + tl.arange(0, BLOCK_M)
    column = column0.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, present = row < end, column < n
    row, column = tl.minimum(row, end - 1), tl.minimum(column, n - 1)  # the last one again: it has an address
    a, b = a + a_index * a_batch, b + batch * b_batch
    a_scale_at = a_scale + a_index * a_scale_batch if A_SCALED else a_scale
    b_scale_at = b_scale + batch * b_scale_batch if HOW == "group" else b_scale
    share = (k + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    lo = tl.program_id(2) * share
    hi = tl.minimum(lo + share, k)
    hi = tl.where(zero, lo, hi)
    k_groups = (k + GROUP - 1) // GROUP
    tall = column // TALL
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.int32 if SUM == "i32" else tl.float32)
    for k0 in range(lo, hi, BLOCK_K):
        x = _numbers(a, row, k0, k, a_row, a_column, A_KIND, TYPE, BLOCK_K, A_UNIT, TAIL)
        w = _numbers(b, column, k0, k, b_row, b_column, B_KIND, TYPE, BLOCK_K, B_UNIT, TAIL)
        if HOW == "group" and INTO:
            if A_SCALED:
                x = _scaled(x, a_scale_at, row, k0, k_groups, a_scale_row, a_scale_column, TYPE, GROUP, EACH, POWER,
                            TAIL)
            w = _scaled(w, b_scale_at, tall, k0, k_groups, b_scale_row, b_scale_column, TYPE, GROUP, EACH, POWER, TAIL)
        if HOW == "group" and not INTO:
            s = _block_scale(a_scale_at, b_scale_at, row, tall, k0 // GROUP, k_groups, a_scale_row, a_scale_column,
                             b_scale_row, b_scale_column, A_SCALED, POWER, SWAP)
            acc += _product(x, w, acc, SWAP, False) * s
        else:
            acc = _product(x, w, acc, SWAP, True)
    if SWAP:
        acc = tl.trans(acc)
    seen = inside[:, None] & present[None, :]
    if SPLITS > 1:
        part = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * m
        tl.store(work + (part + row)[:, None] * n + column[None, :], acc.to(tl.float32), mask=seen)
    else:
        acc = _finish(acc, row, column, batch, a_scale, b_scale, alpha, bias, a_scale_batch, a_scale_row, b_scale_batch,
                      b_scale_row, alpha_batch, bias_batch, a_index, HOW, A_SCALED, ALPHA, BIAS)
        acc = tl.where(zero, 0.0, acc) if GROUPS > 0 else acc
        to = out + (0 if GROUPS > 0 else batch * out_batch) + row[:, None] * out_row + column[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=seen)


@jit(do_not_specialize=("m",))
def _join(
    work, out, a_scale, b_scale, alpha, bias, m, n, out_batch, out_row, a_scale_batch, a_scale_row, b_scale_batch,
    b_scale_row, alpha_batch, bias_batch,
    HOW: tl.constexpr, A_SCALED: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the shares of one row's columns, always in the same order."""
    row, batch = tl.program_id(1).to(tl.int64) + tl.arange(0, 1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    present = column < n
    column = tl.minimum(column, n - 1)
    acc = tl.zeros([1, BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        part = (split * tl.num_programs(2) + batch) * m
        acc += tl.load(work + (part + row)[:, None] * n + column[None, :])
    acc = _finish(acc, row, column, batch, a_scale, b_scale, alpha, bias, a_scale_batch, a_scale_row, b_scale_batch,
                  b_scale_row, alpha_batch, bias_batch, batch, HOW, A_SCALED, ALPHA, BIAS)
    to = out + batch * out_batch + row[:, None] * out_row + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=present[None, :])
# fmt: on
