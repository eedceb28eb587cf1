# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""Flash attention in Triton: one device program behind prefill, extend, decode and latent attention.

The query heads that share a KV head are rows of one tile, token by token, so that a key is read once for all of them
and a tile spans few tokens: little work is lost on the diagonal and at the edges of a window. Keys are packed rows or
pages. A row of tiles may be cut along the keys (``splits``); a second, small program then joins the parts. Every range
is derived on the device from the true lengths: the host knows only bounds.

Source: Dao et al. 2022 and Dao 2023 (tiling, online softmax), https://arxiv.org/abs/2307.08691; Dao et al. 2023
(flash-decoding); Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tskernel.backends.lazy_triton import jit
from tskernel.backends.portable._attention_deal import _deal
from tskernel.backends.portable._attention_join import _join, _merge

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _load_tile(ptr, offset, inside, D: tl.constexpr, FROM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Load rows at ``offset [N]``, columns FROM to FROM + BLOCK_D; what is outside is 0."""
    column = FROM + tl.arange(0, BLOCK_D)
    at = ptr + offset[:, None] + column[None, :]
    if FROM + BLOCK_D > D:
        return tl.load(at, mask=inside[:, None] & (column[None, :] < D), other=0.0)
    elif MASKED:
        return tl.load(at, mask=inside[:, None], other=0.0)
    else:
        return tl.load(at)


@jit
def _entries(n, left, right, table, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr):
    """Return the table's entries for the keys from ``n`` on. WHOLE: a tile never leaves a page, one entry serves it."""
    if WHOLE:
        return tl.load(table + n // PAGE, mask=n < right, other=-1)
    else:
        key = n + tl.arange(0, BLOCK_N)
        return tl.load(table + key // PAGE, mask=(key >= left) & (key < right), other=-1)


@jit
def _place(entry, n, left, right, pages, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
           MASKED: tl.constexpr):
    """Return page and slot of the keys from ``n`` on (0 and the key itself where packed), and which exist."""
    key = n + tl.arange(0, BLOCK_N)
    inside = (key >= left) & (key < right) if MASKED else key >= 0
    if PAGE == 0:
        return tl.zeros_like(key).to(tl.int64), key.to(tl.int64), inside
    else:
        inside = inside & (entry.to(tl.uint32, bitcast=True) < pages)  # as unsigned, -1 is a large number
        slot = n % PAGE + tl.arange(0, BLOCK_N) if WHOLE else key % PAGE
        return entry.to(tl.int64), slot.to(tl.int64), inside


@jit
def _soften(s, factor, cap, CAP: tl.constexpr, FUSED: tl.constexpr):
    """Scale and cap raw scores, in units of log2; FUSED leaves the scale to the exponential."""
    if CAP:
        # tanh by one exponential: where it overflows the quotient is 0 and the result 1.
        return cap * (1.0 - 2.0 / (1.0 + tl.exp2(s * factor)))
    elif FUSED:
        return s
    else:
        return s * factor


@jit
def _hide(s, n, inside, own, left, window, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr,
          WINDOW: tl.constexpr, NARROW: tl.constexpr):
    """Put -inf where a row does not see a key."""
    key = n + tl.arange(0, BLOCK_N)
    if NARROW:
        # By floating-point arithmetic: predicates would have to be kept while the product runs. Places count from
        # ``left``, which makes them small and exact; the distance from a window's middle misses its edge by 0.25.
        middle = (own - left).to(tl.float32) - 0.5 * window
        far = tl.abs((key - left).to(tl.float32)[None, :] - middle[:, None])
        s = tl.minimum(s, (0.5 * window + 0.25 - far) * 1e30 * 1e30)
        return tl.where(inside[None, :], s, float("-inf")) if PAGE > 0 else s
    elif WINDOW:
        # One comparison: as unsigned, a key before the window is a large number. A key behind the last is never seen.
        seen = (key[None, :] - (own[:, None] - window)).to(tl.uint32, bitcast=True) <= window
        return tl.where(seen & inside[None, :] if PAGE > 0 else seen, s, float("-inf"))
    elif CAUSAL:
        return tl.where(inside[None, :] & (key[None, :] <= own[:, None]), s, float("-inf"))
    else:
        return tl.where(inside[None, :], s, float("-inf"))


@jit
def _byte(pairs, HIGH: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Return the low or the high bytes of 16-bit pairs of fp8, as fp16.

    NATIVE: by the instruction of sm89 and later that converts two; the compiler would take it for one at a time.
    """
    if NATIVE:
        BYTES: tl.constexpr = "0x4431" if HIGH else "0x4420"
        KIND: tl.constexpr = "e4m3x2" if TYPE.is_fp8e4nv() else "e5m2x2"
        CODE: tl.constexpr = ("{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $1, 0, " + BYTES
                              + "; mov.b32 {low, high}, t; cvt.rn.f16x2." + KIND + " $0, low; }")
        return tl.inline_asm_elementwise(CODE, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return (pairs >> (8 if HIGH else 0)).to(tl.int8).to(TYPE, bitcast=True).to(tl.float16)


@jit
def _walk(
    acc, odd, top, total, q, q_tail, k_ptr, v_ptr, table, lo, hi, left, right, own, factor, per_row, cap, window, pages,
    k_page, k_row, v_page, v_row,
    D: tl.constexpr, DV: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, D_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    FUSED: tl.constexpr, SHARED_V: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr,
    SAME: tl.constexpr, NARROW: tl.constexpr, MASKED: tl.constexpr,
):
    """Attend to the keys from ``lo`` to ``hi``; only a MASKED walk looks at each key's place.

    PAIRS: two columns of fp8 values are read as one number, so that whole words of shared memory feed the product, and
    ``acc`` and ``odd`` hold the even and the odd columns. WIDE: ``total`` keeps a sum per row and key of a tile, added
    up at the end, so that no round waits for a sum over threads. SAME: keys and values have the same strides.
    """
    CHECKED: tl.constexpr = MASKED or PAGE > 0
    WHOLE: tl.constexpr = PAGE > 0 and PAGE % BLOCK_N == 0
    # fp8 becomes fp16 in one exact instruction, bf16 in two; weights of at most 1 lose nothing in fp16.
    V_TYPE: tl.constexpr = tl.float16 if v_ptr.dtype.element_ty.is_fp8() and q.dtype == tl.bfloat16 else q.dtype
    entry = _entries(lo, left, right, table, PAGE, BLOCK_N, WHOLE) if PAGE > 0 else 0
    for n in range(lo, hi, BLOCK_N):
        page, slot, inside = _place(entry, n, left, right, pages, PAGE, BLOCK_N, WHOLE, MASKED)
        # A page outside the cache hides its tile as a whole, which costs no work on scores.
        page_exists = entry.to(tl.uint32, bitcast=True) < pages if WHOLE else True
        if PAGE > 0:  # a round ahead: the next tile's addresses must not wait for the table
            entry = _entries(n + BLOCK_N, left, hi, table, PAGE, BLOCK_N, WHOLE)
        rows = page * k_page + slot * k_row
        k = _load_tile(k_ptr, rows, inside, D, 0, D_MAIN, CHECKED).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if D_TAIL > 0:
            k_tail = _load_tile(k_ptr, rows, inside, D, D_MAIN, D_TAIL, CHECKED).to(q.dtype)
            s = tl.dot(q_tail, tl.trans(k_tail), acc=s, input_precision="ieee")
        s = _soften(s, factor, cap, CAP, FUSED)
        if MASKED:
            s = _hide(s, n, inside, own, left, window, BLOCK_N, PAGE, CAUSAL, WINDOW, NARROW)
        elif PAGE > 0 and not WHOLE:
            s = tl.where(inside[None, :], s, float("-inf"))
        high = tl.max(s, 1)
        if WHOLE and not MASKED:
            high = tl.where(page_exists, high, float("-inf"))
        new = tl.maximum(top, high * per_row if FUSED else high)
        base = tl.where(new == float("-inf"), 0.0, new) if CHECKED else new
        shrink = tl.exp2(top - base)
        if WHOLE and not MASKED:
            base = tl.where(page_exists, base, float("inf"))
        p = tl.exp2((s * factor if FUSED else s) - base[:, None])
        total = total * shrink[:, None] + p if WIDE else total * shrink + tl.sum(p, 1)
        if PAIRS:
            two = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
            at = rows // 2 if SAME else page * (v_page // 2) + slot * (v_row // 2)
            v = _load_tile(two, at, inside, DV // 2, 0, D_V // 2, CHECKED)
            p = p.to(tl.float16)
            acc = tl.dot(p, _byte(v, False, v_ptr.dtype.element_ty, NATIVE), acc=acc * shrink[:, None])
            odd = tl.dot(p, _byte(v, True, v_ptr.dtype.element_ty, NATIVE), acc=odd * shrink[:, None])
        else:
            if SHARED_V:
                v = k
            else:
                at = rows if SAME else page * v_page + slot * v_row
                v = _load_tile(v_ptr, at, inside, DV, 0, D_V, CHECKED).to(V_TYPE)
            acc = tl.dot(p.to(v.dtype), v, acc=acc * shrink[:, None], input_precision="ieee")
        top = new
    return acc, odd, top, total


@jit
def _finish(acc, odd, top, total, sink_ptr, sink_mask, SINKS: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr,
            BLOCK_M: tl.constexpr, D_V: tl.constexpr):
    """Return the normalised rows and their natural-log LSE; the sink enters the denominator only."""
    if WIDE:
        total = tl.sum(total, 1)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, odd), [BLOCK_M, D_V])
    base = tl.where(top == float("-inf"), 0.0, top)
    lse = (base + tl.log2(total)) * 0.6931471805599453
    if SINKS:
        sink = tl.load(sink_ptr, mask=sink_mask, other=float("-inf")).to(tl.float32)
        total = total + tl.exp2(sink * 1.4426950408889634 - base)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], lse


@jit
def _clear(
    out, lse, part_lse, first, rows, heads, out_row, out_head, lse_row, lse_head, mine, step, split, splits,
    DV: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
):
    """Give the rows behind the last sequence, all heads, the result of a row that sees no key."""
    column = tl.arange(0, D_V)
    start = first.to(tl.int64) * heads + mine * BLOCK
    for n in range(start, tl.cast(rows, tl.int64) * heads, step * BLOCK):  # an argument of 1 is no tensor
        at = n + tl.arange(0, BLOCK)
        inside = at < rows * heads
        token, head = at // heads, at % heads
        nothing = tl.full([BLOCK], float("-inf"), tl.float32)
        if SPLIT:
            tl.store(part_lse + at * splits + split, nothing, mask=inside)
        else:
            to = out + (token * out_row + head * out_head)[:, None] + column[None, :]
            zero = tl.zeros([BLOCK, D_V], tl.float32).to(out.dtype.element_ty)
            tl.store(to, zero, mask=inside[:, None] & (column[None, :] < DV))
            if LSE:
                tl.store(lse + token * lse_row + head * lse_head, nothing, mask=inside)


@jit
def _range(i0, i1, q_len, k_len, window, split, splits, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
           WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """Return which keys tokens i0 to i1 see at all, this split's share of them, and the stretch that all see."""
    shift = k_len - q_len
    left, right, all_from, all_to = 0, k_len, 0, k_len
    if CAUSAL:
        right = tl.maximum(0, tl.minimum(k_len, i1 + shift + 1))
        all_to = tl.maximum(0, tl.minimum(k_len, i0 + shift + 1))
    if WINDOW:
        left = tl.maximum(0, i0 + shift - window)
        all_from = tl.maximum(0, i1 + shift - window)
    start = left // BLOCK_N * BLOCK_N
    blocks = tl.cdiv(tl.maximum(0, right - start), BLOCK_N)
    lo, hi = start, right
    if SPLIT:
        lo = start + split * blocks // splits * BLOCK_N
        hi = tl.minimum(right, start + (split + 1) * blocks // splits * BLOCK_N)
    mid_lo = tl.minimum(hi, tl.maximum(lo, tl.cdiv(all_from, BLOCK_N) * BLOCK_N))
    mid_hi = tl.maximum(mid_lo, tl.minimum(hi, all_to) // BLOCK_N * BLOCK_N)
    return left, right, lo, mid_lo, mid_hi, hi


@jit
def _queries(q, at, real, scale, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, HALF: tl.constexpr,
             FP8_Q: tl.constexpr):
    """Return the queries, their tail, and the factor of raw scores.

    HALF (fp8 keys): fp8 becomes fp16 in one exact instruction, bf16 in three. A row of bf16 is scaled by a power of two
    to just under 2^13, so that nothing that counts is lost in fp16; the factor, one per row then, undoes it.
    """
    queries = _load_tile(q, at, real, D, 0, D_MAIN, True)
    tail = _load_tile(q, at, real, D, D_MAIN, D_TAIL, True) if D_TAIL > 0 else queries
    if HALF and queries.dtype == tl.bfloat16:
        x = queries.to(tl.float32)
        high = tl.max(tl.abs(x), 1)
        if D_TAIL > 0:
            high = tl.maximum(high, tl.max(tl.abs(tail.to(tl.float32)), 1))
        exponent = tl.minimum(tl.maximum(high.to(tl.int32, bitcast=True) >> 23, 14), 253)
        exponent = tl.where(high == 0.0, 127 + 12, exponent)  # a factor of 1: a tiny one times -inf might be NaN
        up = ((254 + 12 - exponent) << 23).to(tl.float32, bitcast=True)
        scale = scale * ((exponent - 12) << 23).to(tl.float32, bitcast=True)
        queries = (x * up[:, None]).to(tl.float16)
        tail = (tail.to(tl.float32) * up[:, None]).to(tl.float16) if D_TAIL > 0 else queries
    elif HALF:
        queries, tail = queries.to(tl.float16), tail.to(tl.float16)
    elif FP8_Q:
        queries, tail = queries.to(tl.bfloat16), tail.to(tl.bfloat16)
    return queries, tail, scale


@jit
def _factor(scale, q_scale, k_scale, head, heads_mask, kv_head, q_scale_step, k_scale_step,
            Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr):
    """Return the factor of raw scores with the scales of queries and keys: one for the tile, or one per row."""
    if K_SCALE:
        scale = scale * tl.load(k_scale + kv_head * k_scale_step)
    if Q_SCALE:
        scale = scale * tl.load(q_scale + head * q_scale_step, mask=heads_mask, other=0.0)
    return scale


@jit
def _attend(
    q, k, v, out, lse, work, cu_q, cu_k, table, lengths, sinks, q_scale, k_scale, v_scale,
    scale, cap, window, rows, heads, q_len, pages, columns, splits, batch, spread, work_lse, work_deal,
    q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, out_row, out_head, lse_row, lse_head, table_row,
    q_scale_step, k_scale_step, v_scale_step,
    D: tl.constexpr, DV: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, D_V: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    RAGGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FUSED: tl.constexpr,
    SINKS: tl.constexpr, Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, LSE: tl.constexpr,
    SHARED_V: tl.constexpr, FP8_Q: tl.constexpr, PHASES: tl.constexpr, NARROW: tl.constexpr, HALF: tl.constexpr,
    PAIRS: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr, SAME: tl.constexpr, KV_FIRST: tl.constexpr,
    DEALT: tl.constexpr,
):
    """One tile of queries of one KV head of one sequence, over one share of its keys.

    ``work`` holds the parts, from ``work_lse`` on their LSEs, from ``work_deal`` on what ``_deal`` found. Lengths are
    loaded here: torch's analysis of what a program writes would take what a function loads them from for written.
    """
    scale, cap = tl.full([], scale, tl.float32), tl.full([], cap, tl.float32)  # Inductor passes numbers in double
    kv_head, tile, tiles, seq, split = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.program_id(2), 0
    if not KV_FIRST:
        kv_head, tile, tiles = tile, kv_head, tl.num_programs(0)
    part_lse = work + work_lse if SPLIT else work
    place = seq
    if DEALT > 0:
        seq, split, splits = _deal(lengths, work, work_deal, place, (kv_head == 0) & (tile == 0), batch, spread,
                                   columns * PAGE, DEALT, BLOCK_N, SPLIT)
        if splits == 0:
            return
    elif SPLIT:
        tile, tiles, split = tile // splits, tiles // splits, tile % splits
    if RAGGED:  # noqa: SIM102
        if seq == tl.num_programs(2) - 1:
            _clear(out, lse, part_lse, tl.load(cu_q + seq), rows, heads, out_row, out_head, lse_row, lse_head,
                   kv_head + tile * (heads // GROUP), heads // GROUP * tiles, split, splits, DV, D_V, 16, LSE, SPLIT)
            return
    q_start = (tl.load(cu_q + seq) if RAGGED else seq * q_len).to(tl.int64)
    q_len = (tl.load(cu_q + seq + 1) - q_start).to(tl.int32) if RAGGED else q_len
    k_start = 0 if PAGE > 0 else tl.load(cu_k + seq)  # and a wrong length stays inside the table:
    k_len = tl.minimum(tl.load(lengths + seq), columns * PAGE) if PAGE > 0 else tl.load(cu_k + seq + 1) - k_start
    # The last tiles see the most keys: first come, first served.
    first = (tiles - 1 - tile) * BLOCK_M
    if first >= q_len * GROUP:
        return
    row = first + tl.arange(0, BLOCK_M)
    token, head, real = row // GROUP, kv_head * GROUP + row % GROUP, row < q_len * GROUP
    at = (q_start + token) * q_row + head.to(tl.int64) * q_head
    factor = _factor(scale, q_scale, k_scale, head, real, kv_head, q_scale_step, k_scale_step, Q_SCALE, K_SCALE)
    queries, tail, per_row = _queries(q, at, real, factor, D, D_MAIN, D_TAIL, HALF, FP8_Q)
    factor = per_row[:, None] if Q_SCALE or (HALF and q.dtype.element_ty == tl.bfloat16) else per_row
    k = k + tl.cast(k_start, tl.int64) * k_row + kv_head.to(tl.int64) * k_head
    v = v + tl.cast(k_start, tl.int64) * v_row + kv_head.to(tl.int64) * v_head
    table = table + seq.to(tl.int64) * table_row if PAGE > 0 else table
    acc, row_lse = _tile(
        queries, tail, k, v, table, sinks + head if SINKS else sinks, real, first, token, q_len, k_len, split, splits,
        factor, per_row, cap, window, pages, k_page, k_row, v_page, v_row, D, DV, D_MAIN, D_TAIL, D_V, GROUP, BLOCK_M,
        BLOCK_N, SPLIT, PAGE, CAUSAL, WINDOW, CAP, FUSED, SINKS and not SPLIT, SHARED_V, PHASES, NARROW, PAIRS, NATIVE,
        WIDE, SAME)
    acc = acc * tl.load(v_scale + kv_head * v_scale_step) if V_SCALE else acc
    if DEALT > 0:
        at = (place.to(tl.int64) * q_len + token) * heads + head
    else:
        at = ((q_start + token) * heads + head) * splits + split
    _store(acc, row_lse, out, lse, work, part_lse, at, q_start + token, head, real, out_row, out_head, lse_row,
           lse_head, DV, D_V, LSE, SPLIT)


@jit
def _tile(
    queries, tail, k, v, table, sink_ptr, real, first, token, q_len, k_len, split, splits, factor, per_row, cap,
    window, pages, k_page, k_row, v_page, v_row,
    D: tl.constexpr, DV: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, D_V: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FUSED: tl.constexpr, SINKS: tl.constexpr,
    SHARED_V: tl.constexpr, PHASES: tl.constexpr, NARROW: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
    WIDE: tl.constexpr, SAME: tl.constexpr,
):
    """Return a tile's rows and their LSE. PHASES: the stretch of keys that all rows see is walked without a mask."""
    i1 = tl.minimum(first + BLOCK_M, q_len * GROUP) - 1
    left, right, lo, mid_lo, mid_hi, hi = _range(
        first // GROUP, i1 // GROUP, q_len, k_len, window, split, splits, BLOCK_N, CAUSAL, WINDOW, SPLIT)
    own = token + (k_len - q_len)
    acc = tl.zeros([BLOCK_M, D_V // 2 if PAIRS else D_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N] if WIDE else [BLOCK_M], tl.float32)
    odd = tl.zeros([BLOCK_M, D_V // 2], tl.float32) if PAIRS else top
    if PHASES:
        if WINDOW:
            acc, odd, top, total = _walk(
                acc, odd, top, total, queries, tail, k, v, table, lo, mid_lo, left, right, own, factor, per_row, cap,
                window, pages, k_page, k_row, v_page, v_row, D, DV, D_MAIN, D_TAIL, D_V, BLOCK_N, PAGE, CAUSAL, WINDOW,
                CAP, FUSED, SHARED_V, PAIRS, NATIVE, WIDE, SAME, NARROW, True)
        acc, odd, top, total = _walk(
            acc, odd, top, total, queries, tail, k, v, table, mid_lo, mid_hi, left, right, own, factor, per_row, cap,
            window, pages, k_page, k_row, v_page, v_row, D, DV, D_MAIN, D_TAIL, D_V, BLOCK_N, PAGE, CAUSAL, WINDOW,
            CAP, FUSED, SHARED_V, PAIRS, NATIVE, WIDE, SAME, NARROW, False)
        lo = mid_hi
    acc, odd, top, total = _walk(
        acc, odd, top, total, queries, tail, k, v, table, lo, hi, left, right, own, factor, per_row, cap, window,
        pages, k_page, k_row, v_page, v_row, D, DV, D_MAIN, D_TAIL, D_V, BLOCK_N, PAGE, CAUSAL, WINDOW, CAP, FUSED,
        SHARED_V, PAIRS, NATIVE, WIDE, SAME, NARROW, True)
    return _finish(acc, odd, top, total, sink_ptr, real, SINKS, PAIRS, WIDE, BLOCK_M, D_V)


@jit
def _store(
    acc, row_lse, out, lse, part, part_lse, at, token, head, real, out_row, out_head, lse_row, lse_head,
    DV: tl.constexpr, D_V: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
):
    """Write a tile's result, or its part of one in place ``at``; a part without keys is known by its LSE alone."""
    column = tl.arange(0, D_V)
    if SPLIT:
        some = real & (row_lse > float("-inf"))
        tl.store(part + at[:, None] * DV + column[None, :], acc, mask=some[:, None] & (column[None, :] < DV))
        tl.store(part_lse + at, row_lse, mask=real)
    else:
        to = out + (token * out_row + head * out_head)[:, None] + column[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (column[None, :] < DV))
        if LSE:
            tl.store(lse + token * lse_row + head * lse_head, row_lse, mask=real)
# fmt: on

# Launching a program puts Triton's own object in the place of its name; here the declarations stay.
DECLARED: Final = {"attend": _attend, "join": _join, "merge": _merge}
