# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
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
def _locate(n, left, right, table, pages, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr):
    """Return page and slot of the keys from ``n`` on (0 and the key itself where keys are packed), and which exist.

    WHOLE: a tile never leaves a page, so one entry of the table serves it.
    """
    key = n + tl.arange(0, BLOCK_N)
    inside = (key >= left) & (key < right)
    if PAGE == 0:
        page, slot = tl.zeros_like(key), key
    elif WHOLE:
        page = tl.load(table + n // PAGE) + tl.zeros_like(key)
        slot = n % PAGE + tl.arange(0, BLOCK_N)
        inside = inside & (page >= 0) & (page < pages)
    else:
        page = tl.load(table + key // PAGE, mask=inside, other=-1)
        slot = key % PAGE
        inside = inside & (page >= 0) & (page < pages)
    return page.to(tl.int64), slot.to(tl.int64), inside


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
def _walk(
    acc, top, total, q, q_tail, k_ptr, v_ptr, table, lo, hi, left, right, own, factor, cap, window, pages,
    k_page, k_row, v_page, v_row,
    D: tl.constexpr, DV: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, D_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, FUSED: tl.constexpr, SHARED_V: tl.constexpr, MASKED: tl.constexpr,
):
    """Attend to the keys from ``lo`` to ``hi``; only a MASKED walk looks at each key's place."""
    CHECKED: tl.constexpr = MASKED or PAGE > 0
    # fp8 becomes fp16 in one exact instruction, bf16 in two; weights of at most 1 lose nothing in fp16.
    V_TYPE: tl.constexpr = tl.float16 if v_ptr.dtype.element_ty.is_fp8() and q.dtype == tl.bfloat16 else q.dtype
    for n in range(lo, hi, BLOCK_N):
        page, slot, inside = _locate(n, left, right, table, pages, PAGE, BLOCK_N, WHOLE)
        rows = page * k_page + slot * k_row
        k = _load_tile(k_ptr, rows, inside, D, 0, D_MAIN, CHECKED).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if D_TAIL > 0:
            k_tail = _load_tile(k_ptr, rows, inside, D, D_MAIN, D_TAIL, CHECKED).to(q.dtype)
            s = tl.dot(q_tail, tl.trans(k_tail), acc=s, input_precision="ieee")
        s = _soften(s, factor, cap, CAP, FUSED)
        if CHECKED:
            seen = inside[None, :]
            if MASKED and CAUSAL:
                key = n + tl.arange(0, BLOCK_N)
                seen = seen & (key[None, :] <= own[:, None])
                if WINDOW:
                    seen = seen & (key[None, :] >= own[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        high = tl.max(s, 1)
        new = tl.maximum(top, high * factor if FUSED else high)
        base = tl.where(new == float("-inf"), 0.0, new) if CHECKED else new
        p = tl.exp2((s * factor if FUSED else s) - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if SHARED_V:
            v = k
        else:
            v = _load_tile(v_ptr, page * v_page + slot * v_row, inside, DV, 0, D_V, CHECKED).to(V_TYPE)
        acc = tl.dot(p.to(v.dtype), v, acc=acc * shrink[:, None], input_precision="ieee")
        top = new
    return acc, top, total


@jit
def _finish(acc, top, total, sink_ptr, sink_mask, SINKS: tl.constexpr):
    """Return the normalised rows and their natural-log LSE; the sink enters the denominator only."""
    base = tl.where(top == float("-inf"), 0.0, top)
    lse = (base + tl.log2(total)) * 0.6931471805599453
    if SINKS:
        sink = tl.load(sink_ptr, mask=sink_mask, other=float("-inf")).to(tl.float32)
        total = total + tl.exp2(sink * 1.4426950408889634 - base)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], lse


@jit
def _clear(
    out, lse, part_lse, first, rows, heads, out_row, out_head, lse_row, lse_head,
    tile, tiles, split, splits,
    DV: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
):
    """Give the rows behind the last sequence, all heads, the result of a row that sees no key."""
    column = tl.arange(0, D_V)
    mine = tl.program_id(0) + tile * tl.num_programs(0)
    start = first.to(tl.int64) * heads + mine * BLOCK
    step = tl.num_programs(0) * tiles * BLOCK
    for n in range(start, tl.cast(rows, tl.int64) * heads, step):  # an argument of 1 is no tensor
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
def _lengths(cu_q, cu_k, lengths, seq, q_len, columns, RAGGED: tl.constexpr, PAGE: tl.constexpr):
    """Return where a sequence's queries and keys start and how many there are."""
    if RAGGED:
        q_start = tl.load(cu_q + seq)
        q_len = tl.load(cu_q + seq + 1) - q_start
    else:
        q_start = seq * q_len
    if PAGE > 0:
        k_start = 0
        k_len = tl.minimum(tl.load(lengths + seq), columns * PAGE)  # a wrong length stays inside the table
    else:
        k_start = tl.load(cu_k + seq)
        k_len = tl.load(cu_k + seq + 1) - k_start
    return q_start.to(tl.int64), q_len, k_start, k_len


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
def _factor(scale, q_scale, k_scale, head, heads_mask, kv_head, q_scale_step, k_scale_step,
            Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr):
    """Return the factor of raw scores: one for the tile, or one per row."""
    if K_SCALE:
        scale = scale * tl.load(k_scale + kv_head * k_scale_step)
    if Q_SCALE:
        scale = scale * tl.load(q_scale + head * q_scale_step, mask=heads_mask, other=0.0)[:, None]
    return scale


@jit
def _attend(
    q, k, v, out, lse, part, part_lse, cu_q, cu_k, table, lengths, sinks, q_scale, k_scale, v_scale,
    scale, cap, window, rows, heads, q_len, pages, columns, splits, q_row, q_head, k_page, k_row, k_head,
    v_page, v_row, v_head, out_row, out_head, lse_row, lse_head, table_row, q_scale_step, k_scale_step, v_scale_step,
    D: tl.constexpr, DV: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, D_V: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    RAGGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FUSED: tl.constexpr,
    SINKS: tl.constexpr, Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, LSE: tl.constexpr,
    SHARED_V: tl.constexpr, FP8_Q: tl.constexpr, PHASES: tl.constexpr,
):
    """One tile of queries of one KV head of one sequence, over one share of its keys."""
    kv_head, seq, tile, tiles, split = tl.program_id(0), tl.program_id(2), tl.program_id(1), tl.num_programs(1), 0
    if SPLIT:
        tile, tiles, split = tile // splits, tiles // splits, tile % splits
    if RAGGED:  # noqa: SIM102
        if seq == tl.num_programs(2) - 1:
            _clear(out, lse, part_lse, tl.load(cu_q + seq), rows, heads, out_row, out_head, lse_row, lse_head,
                   tile, tiles, split, splits, DV, D_V, 16, LSE, SPLIT)
            return
    q_start, q_len, k_start, k_len = _lengths(cu_q, cu_k, lengths, seq, q_len, columns, RAGGED, PAGE)
    # The last tiles see the most keys: first come, first served.
    first = (tiles - 1 - tile) * BLOCK_M
    if first >= q_len * GROUP:
        return
    row = first + tl.arange(0, BLOCK_M)
    token, head, real = row // GROUP, kv_head * GROUP + row % GROUP, row < q_len * GROUP
    at = (q_start + token) * q_row + head.to(tl.int64) * q_head
    queries = _load_tile(q, at, real, D, 0, D_MAIN, True)
    queries = queries.to(tl.bfloat16) if FP8_Q else queries
    tail = _load_tile(q, at, real, D, D_MAIN, D_TAIL, True).to(queries.dtype) if D_TAIL > 0 else queries
    i1 = tl.minimum(first + BLOCK_M, q_len * GROUP) - 1
    left, right, lo, mid_lo, mid_hi, hi = _range(
        first // GROUP, i1 // GROUP, q_len, k_len, window, split, splits, BLOCK_N, CAUSAL, WINDOW, SPLIT)
    factor = _factor(scale, q_scale, k_scale, head, real, kv_head, q_scale_step, k_scale_step, Q_SCALE, K_SCALE)
    own = token + (k_len - q_len)
    k = k + k_start.to(tl.int64) * k_row + kv_head.to(tl.int64) * k_head
    v = v + k_start.to(tl.int64) * v_row + kv_head.to(tl.int64) * v_head
    table = table + seq.to(tl.int64) * table_row if PAGE > 0 else table
    acc = tl.zeros([BLOCK_M, D_V], tl.float32)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    WHOLE: tl.constexpr = PAGE > 0 and PAGE % BLOCK_N == 0
    if PHASES:
        if WINDOW:
            acc, top, total = _walk(
                acc, top, total, queries, tail, k, v, table, lo, mid_lo, left, right, own, factor, cap, window, pages,
                k_page, k_row, v_page, v_row, D, DV, D_MAIN, D_TAIL, D_V, BLOCK_N, PAGE, WHOLE, CAUSAL, WINDOW, CAP,
                FUSED, SHARED_V, True)
        acc, top, total = _walk(
            acc, top, total, queries, tail, k, v, table, mid_lo, mid_hi, left, right, own, factor, cap, window, pages,
            k_page, k_row, v_page, v_row, D, DV, D_MAIN, D_TAIL, D_V, BLOCK_N, PAGE, WHOLE, CAUSAL, WINDOW, CAP,
            FUSED, SHARED_V, False)
        lo = mid_hi
    acc, top, total = _walk(
        acc, top, total, queries, tail, k, v, table, lo, hi, left, right, own, factor, cap, window, pages,
        k_page, k_row, v_page, v_row, D, DV, D_MAIN, D_TAIL, D_V, BLOCK_N, PAGE, WHOLE, CAUSAL, WINDOW, CAP,
        FUSED, SHARED_V, True)
    acc, row_lse = _finish(acc, top, total, sinks + head if SINKS else sinks, real, SINKS and not SPLIT)
    if V_SCALE:
        acc = acc * tl.load(v_scale + kv_head * v_scale_step)
    _store(acc, row_lse, out, lse, part, part_lse, q_start + token, head, real, heads, split, splits, out_row, out_head,
           lse_row, lse_head, DV, D_V, LSE, SPLIT)


@jit
def _store(
    acc, row_lse, out, lse, part, part_lse, token, head, real, heads, split, splits, out_row, out_head, lse_row,
    lse_head, DV: tl.constexpr, D_V: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
):
    """Write a tile's result, or its part of one; a part without keys is known by its LSE alone."""
    column = tl.arange(0, D_V)
    if SPLIT:
        at = (token * heads + head) * splits + split
        some = real & (row_lse > float("-inf"))
        tl.store(part + at[:, None] * DV + column[None, :], acc, mask=some[:, None] & (column[None, :] < DV))
        tl.store(part_lse + at, row_lse, mask=real)
    else:
        to = out + (token * out_row + head * out_head)[:, None] + column[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (column[None, :] < DV))
        if LSE:
            tl.store(lse + token * lse_row + head * lse_head, row_lse, mask=real)


@jit
def _join(
    part, part_lse, out, lse, sinks, heads, splits, out_row, out_head, lse_row, lse_head,
    DV: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):
    """Join the parts of one row: weights relative to the largest LSE, the sink once."""
    token, head, column = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, D_V)
    first = (token * heads + head) * splits
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    for n in range(0, splits, BLOCK):
        split = n + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.load(part_lse + first + split, mask=split < splits, other=float("-inf")))
    top = tl.max(high, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D_V], tl.float32)
    for n in range(0, splits, BLOCK):
        split = n + tl.arange(0, BLOCK)
        share = tl.load(part_lse + first + split, mask=split < splits, other=float("-inf"))
        weight = tl.exp(share - base)
        some = (share > float("-inf"))[:, None] & (column[None, :] < DV)
        acc += weight[:, None] * tl.load(part + (first + split)[:, None] * DV + column[None, :], mask=some, other=0.0)
        total += weight
    whole = tl.sum(total, 0)
    if LSE:
        tl.store(lse + token * lse_row + head * lse_head, base + tl.log(whole))
    if SINKS:
        whole += tl.exp(tl.load(sinks + head).to(tl.float32) - base)
    value = tl.sum(acc, 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + token * out_row + head * out_head + column, value.to(out.dtype.element_ty), mask=column < DV)


@jit
def _merge(
    a, lse_a, b, lse_b, out, lse, rows, heads, a_row, a_head, b_row, b_head, la_row, la_head, lb_row, lb_head,
    DV: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr,
):
    """Weigh the parts relative to the larger LSE; a part without keys is not read."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, D_V)
    inside = at < rows * heads
    token, head = at // heads, at % heads
    none = float("-inf")
    s_a = tl.load(lse_a + token * la_row + head * la_head, mask=inside, other=none)
    s_b = tl.load(lse_b + token * lb_row + head * lb_head, mask=inside, other=none)
    top = tl.maximum(s_a, s_b)
    base = tl.where(top == none, 0.0, top)
    w_a, w_b = tl.exp(s_a - base), tl.exp(s_b - base)
    total = w_a + w_b
    over = tl.where(total == 0.0, 1.0, total)
    wide = (column < DV)[None, :]
    from_a = a + (token * a_row + head * a_head)[:, None] + column[None, :]
    from_b = b + (token * b_row + head * b_head)[:, None] + column[None, :]
    x = tl.load(from_a, mask=(s_a > none)[:, None] & wide, other=0.0)
    y = tl.load(from_b, mask=(s_b > none)[:, None] & wide, other=0.0)
    value = x.to(tl.float32) * (w_a / over)[:, None] + y.to(tl.float32) * (w_b / over)[:, None]
    tl.store(out + at[:, None] * DV + column[None, :], value.to(out.dtype.element_ty), mask=inside[:, None] & wide)
    tl.store(lse + at, base + tl.log(total), mask=inside)
# fmt: on

# Launching a program puts Triton's own object in the place of its name; here the declarations stay.
DECLARED: Final = {"attend": _attend, "join": _join, "merge": _merge}
