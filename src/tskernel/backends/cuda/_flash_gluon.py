# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Flash attention for Hopper in Gluon: a producer warp and two or three consumer warpgroups, persistent.

A tile of work is ``CONSUMERS x 64`` rows of one KV head: tokens of one sequence times the ``PACK`` query heads that are
side by side. The producer copies queries, keys and values with the tensor memory accelerator into rings of buffers,
those of the next tile too, while the consumers compute: one's softmax runs under another's products, in turns where
that helps. A consumer issues the scores of a block together with the values of the block before.

Every range is derived on the device from the true lengths. Rows that no sequence owns are one more sequence, without
keys, behind the last.

Source: Shah et al. 2024 (FlashAttention-3), https://arxiv.org/abs/2407.08608; Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tskernel.backends.lazy_triton import gluon_jit

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper


# fmt: off
@gluon_jit
def _search(tile, cu_q, cu_k, sequences, rows, TOKENS: gl.constexpr):
    """Return the sequence of a tile: from which tile on, up to which, and where its queries and keys are.

    Sequence s starts at tile ``cu_q[s] // TOKENS + s``, which leaves each enough tiles without a count of them.
    """
    low = 0
    high = sequences + 1
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(cu_q + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    owned = low < sequences
    q_start = gl.load(cu_q + low)
    q_end = gl.where(owned, gl.load(cu_q + low + 1, mask=owned, other=0), rows)
    k_start = gl.load(cu_k + low)
    k_len = gl.where(owned, gl.load(cu_k + low + 1, mask=owned, other=0) - k_start, 0)
    return q_start // TOKENS + low, q_end // TOKENS + low + 1, q_start, q_end - q_start, k_start, k_len


@gluon_jit
def _take(taken):
    """Return the next job that no program of this group of heads has; the first ones are as many as programs."""
    return gl.num_programs(0) + gl.atomic_add(taken + gl.program_id(1), 1, sem="relaxed")


@gluon_jit
def _publish(job, turn, jobs, j_full, j_empty):
    """Tell the consumers which job is next."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    hopper.mbarrier.wait(j_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    jobs.index(turn % 2).store(gl.full([32], 0, gl.int32, LAYOUT) + job)
    hopper.mbarrier.arrive(j_full.index(turn % 2), count=1)


@gluon_jit
def _next(turn, jobs, j_full, j_empty):
    """Return the job of a consumer's turn."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    hopper.mbarrier.wait(j_full.index(turn % 2), (turn // 2) & 1)
    job = gl.max(jobs.index(turn % 2).load(LAYOUT), 0)
    hopper.mbarrier.arrive(j_empty.index(turn % 2), count=1)
    return job


@gluon_jit
def _keys(first, q_len, k_len, exists, window,
          TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Return the first key that a tile sees, and how many blocks of keys there are from it on."""
    left = 0
    right = k_len
    if CAUSAL:
        right = gl.minimum(k_len, gl.minimum(first + TOKENS, q_len) + k_len - q_len)
    if WINDOW:
        left = gl.maximum(0, first + k_len - q_len - window)
    count = gl.maximum(0, right - left + BLOCK_N - 1) // BLOCK_N
    return left, gl.where(exists & (first < q_len), count, 0)


@gluon_jit
def _open(job, base, end, q_start, q_len, k_start, k_len, work,
          HEADS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Return a job's block of heads, first token, first key and number of blocks of keys, and its sequence.

    The last tiles, which see the most keys, are the first jobs. ``HEADS`` blocks of heads go side by side: what they
    read stays in the L2 cache.
    """
    cu_q, cu_k, sequences, tiles, rows, window, _taken = work
    exists = job < tiles * HEADS
    tile, block = tiles - 1 - job // HEADS, gl.program_id(1) * HEADS + job % HEADS
    if exists & ((tile < base) | (tile >= end)):
        base, end, q_start, q_len, k_start, k_len = _search(tile, cu_q, cu_k, sequences, rows, TOKENS)
    first = (tile - base) * TOKENS
    left, count = _keys(first, q_len, k_len, exists, window, TOKENS, BLOCK_N, CAUSAL, WINDOW)
    return block, first, left, count, base, end, q_start, q_len, k_start, k_len


@gluon_jit
def _fetch(desc, row, head, full, buffers, stage):
    """Copy rows of one head into a stage of a ring."""
    hopper.mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(desc, [row, head, 0], full.index(stage), buffers.index(stage))


@gluon_jit
def _produce(q_desc, k_desc, v_desc, rings, work,
             HEADS: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, CONSUMERS: gl.constexpr,
             Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
             WINDOW: gl.constexpr):
    """Copy the queries of each tile, then its keys and values from the last block to the first, keys one ahead.

    What frees a stage of the keys is done with the values before it too.
    """
    TOKENS: gl.constexpr = CONSUMERS * 64 // PACK
    q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, v_full, k_freed, _turns, jobs, j_full, j_empty = rings
    tiles, taken = work[3], work[6]
    step = 0
    served = 0
    turn = 0
    job = gl.program_id(0)
    block, first, left, count, base, end, q_start, q_len, k_start, k_len = _open(
        job, job * 0, job * 0, job * 0, job * 0, job * 0, job * 0, work, HEADS, TOKENS, BLOCK_N, CAUSAL, WINDOW)
    _publish(job, turn, jobs, j_full, j_empty)
    while job < tiles * HEADS:
        turn += 1
        if count > 0:
            kv_head = block * PACK // GROUP
            for w in gl.static_range(CONSUMERS):
                stage = served % Q_STAGES * CONSUMERS + w
                hopper.mbarrier.wait(q_empty.index(stage), ((served // Q_STAGES) & 1) ^ 1)
                _fetch(q_desc, q_start + first + w * (64 // PACK), block * PACK, q_full, q_bufs, stage)
            served += 1
            at = k_start + left + (count - 1) * BLOCK_N
            hopper.mbarrier.wait(k_freed.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
            _fetch(k_desc, at, kv_head, k_full, k_bufs, step % STAGES)
            for _ in range(1, count):
                ahead = step + 1
                hopper.mbarrier.wait(k_freed.index(ahead % STAGES), ((ahead // STAGES) & 1) ^ 1)
                _fetch(k_desc, at - BLOCK_N, kv_head, k_full, k_bufs, ahead % STAGES)
                _fetch(v_desc, at, kv_head, v_full, v_bufs, step % STAGES)
                at -= BLOCK_N
                step = ahead
            # The answer takes no longer than the stage to become free.
            job = _take(taken)
            hopper.mbarrier.wait(k_freed.index((step + 1) % STAGES), (((step + 1) // STAGES) & 1) ^ 1)
            _fetch(v_desc, at, kv_head, v_full, v_bufs, step % STAGES)
            step += 1
        else:
            job = _take(taken)
        _publish(job, turn, jobs, j_full, j_empty)
        block, first, left, count, base, end, q_start, q_len, k_start, k_len = _open(
            job, base, end, q_start, q_len, k_start, k_len, work, HEADS, TOKENS, BLOCK_N, CAUSAL, WINDOW)


@gluon_jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon_jit
def _sums(weights, BLOCK_N: gl.constexpr):
    """Sum each row's weights within a thread: the four threads of a row meet only once, behind the last block."""
    return gl.sum(gl.sum(gl.reshape(weights, [64, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon_jit
def _fade(total, shrink):
    return total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]


@gluon_jit
def _pack(weights, dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """Round pairs of weights into one register each: halves carried around a loop would be taken apart each time."""
    low, high = gl.split(gl.reshape(weights, [64, BLOCK_N // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon_jit
def _unpack(pairs, dtype: gl.constexpr, BLOCK_N: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Return pairs of weights as the left operand of a product."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    weights = gl.reshape(gl.join(low, high), [64, BLOCK_N]).to(dtype, bitcast=True)
    return gl.convert_layout(weights, P_LAYOUT)


@gluon_jit
def _soften(s, factor, cap, CAP: gl.constexpr, FUSED: gl.constexpr):
    """Scale and cap raw scores, in units of log2; FUSED leaves the scale to the exponential."""
    if CAP:
        # tanh by one exponential: where it overflows the quotient is 0 and the result 1.
        return cap * (1.0 - 2.0 / (1.0 + _exp2(s * factor)))
    elif FUSED:
        return s
    else:
        return s * factor


@gluon_jit
def _mask(s, own, start, window, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Hide the keys behind ``own``, each row's last one, and those before its window."""
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
    last = own - start
    s = gl.where(column[None, :] <= last[:, None], s, float("-inf"))
    if WINDOW:
        s = gl.where(column[None, :] >= (last - window)[:, None], s, float("-inf"))
    return s


@gluon_jit
def _weigh(s, top, factor, FUSED: gl.constexpr, MASKED: gl.constexpr):
    """Return weights relative to the highest score so far, that score, and the factor for what came before."""
    high = gl.max(s, 1)
    if FUSED:
        high = high * factor
    new = gl.maximum(top, high)
    base = new
    if MASKED:
        base = gl.where(new == float("-inf"), 0.0, new)
    if FUSED:
        weights = _exp2(s * factor - base[:, None])
    else:
        weights = _exp2(s - base[:, None])
    return weights, new, _exp2(top - base)


@gluon_jit
def _clean(v_buf, valid, BLOCK_N: gl.constexpr, D_V: gl.constexpr):
    """Zero the rows of a value block from ``valid`` on: what lies there may be NaN, and 0 * NaN is NaN.

    All consumers do it, for themselves: the same zeros.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_V, D_V // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = 16
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(BLOCK_N // ROWS):
        if valid < (i + 1) * ROWS:
            part = v_buf.slice(i * ROWS, ROWS)
            values = part.load(LAYOUT)
            part.store(gl.where((i * ROWS + row < valid)[:, None], values, 0.0))
    hopper.fence_async_shared()


@gluon_jit
def _scale_rows(acc, by, O_LAYOUT: gl.constexpr):
    return acc * gl.convert_layout(by, gl.SliceLayout(1, O_LAYOUT))[:, None]


@gluon_jit
def _walk(acc, pairs, top, total, shrink, step, blocks_from, blocks_to, own, left, window, factor, cap,
          q_buf, k_bufs, v_bufs, k_full, v_full, k_freed, turns,
          W: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr,
          CAP: gl.constexpr, FUSED: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr,
          S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Score the key blocks from ``blocks_to - 1`` down to ``blocks_from``, each time adding the block before."""
    dtype: gl.constexpr = v_bufs.dtype
    for i in range(0, blocks_to - blocks_from):
        n = blocks_to - 1 - i
        stage = step % STAGES
        last = (step - 1) % STAGES
        hopper.mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        if TURNS:
            hopper.mbarrier.wait(turns.index(W), (step & 1) ^ (1 if W == 0 else 0))
        s = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
        s = hopper.warpgroup_mma(q_buf, k_bufs.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
        if LATE:
            acc = _scale_rows(acc, shrink, O_LAYOUT)
        hopper.mbarrier.wait(v_full.index(last), ((step - 1) // STAGES) & 1)
        acc = hopper.warpgroup_mma(_unpack(pairs, dtype, BLOCK_N, P_LAYOUT), v_bufs.index(last), acc, is_async=True)
        if TURNS:
            hopper.mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)
        s, acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[s, acc])
        hopper.mbarrier.arrive(k_freed.index(stage), count=1)
        s = _soften(s, factor, cap, CAP, FUSED)
        if MASKED:
            s = _mask(s, own, left + n * BLOCK_N, window, BLOCK_N, WINDOW, S_LAYOUT)
        weights, top, shrink = _weigh(s, top, factor, FUSED, MASKED)
        total = _fade(total, shrink) + _sums(weights, BLOCK_N)
        pairs = _pack(weights, dtype, BLOCK_N)
        if not LATE:
            acc = _scale_rows(acc, shrink, O_LAYOUT)
        step += 1
    return acc, pairs, top, total, shrink, step


@gluon_jit
def _rows(out, value, block, q_start, q_len, mine, out_row, out_head,
          DV: gl.constexpr, D_V: gl.constexpr, PACK: gl.constexpr, WIDE: gl.constexpr):
    """Write the rows that exist, 16 bytes a thread."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    token = mine + row // PACK
    column = gl.arange(0, D_V, layout=gl.SliceLayout(0, WIDE))
    to = (q_start + token).to(gl.int64) * out_row + (block * PACK + row % PACK) * out_head
    gl.store(out + to[:, None] + column[None, :], value, mask=(token < q_len)[:, None] & (column < DV)[None, :])


@gluon_jit
def _finish(acc, top, total, out, out_desc, lse, sinks, buffer, block, q_start, q_len, mine,
            out_row, out_head, lse_row, lse_head,
            DV: gl.constexpr, D_V: gl.constexpr, PACK: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
            BULK: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Normalise and write the rows that exist; the sink enters the denominator only."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    token = mine + row // PACK
    head = block * PACK + row % PACK
    base = gl.where(top == float("-inf"), 0.0, top)
    if LSE:
        to_lse = (q_start + token).to(gl.int64) * lse_row + head * lse_head
        gl.store(lse + to_lse, (base + gl.log2(total)) * 0.6931471805599453, mask=token < q_len)
    if SINKS:
        sink = gl.load(sinks + head).to(gl.float32)
        total = total + _exp2(sink * 1.4426950408889634 - base)
    acc = _scale_rows(acc, 1.0 / gl.where(total == 0.0, 1.0, total), O_LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_V, D_V // 8], [4, 1], [1, 0])
    value = acc.to(out.dtype.element_ty)
    if BULK:
        buffer.reshape([64, D_V]).store(value)
        hopper.fence_async_shared()
        if mine + 64 // PACK <= q_len:
            hopper.tma.async_copy_shared_to_global(out_desc, [q_start + mine, block * PACK, 0], buffer)
        else:
            _rows(out, buffer.reshape([64, D_V]).load(WIDE), block, q_start, q_len, mine, out_row, out_head,
                  DV, D_V, PACK, WIDE)
    else:
        _rows(out, gl.convert_layout(value, WIDE), block, q_start, q_len, mine, out_row, out_head, DV, D_V, PACK, WIDE)


@gluon_jit
def _blank(out, lse, block, q_start, q_len, mine, out_row, out_head, lse_row, lse_head,
           DV: gl.constexpr, D_V: gl.constexpr, PACK: gl.constexpr, LSE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Write the rows of a tile without keys."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_V, D_V // 8], [4, 1], [1, 0])
    if LSE:
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        token = mine + row // PACK
        to_lse = (q_start + token).to(gl.int64) * lse_row + (block * PACK + row % PACK) * lse_head
        gl.store(lse + to_lse, row * 0.0 + float("-inf"), mask=token < q_len)
    _rows(out, gl.zeros([64, D_V], out.dtype.element_ty, WIDE), block, q_start, q_len, mine, out_row, out_head,
          DV, D_V, PACK, WIDE)


@gluon_jit
def _write(acc, top, total, seen, out, out_desc, lse, sinks, buffer, to, strides,
           DV: gl.constexpr, D_V: gl.constexpr, PACK: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
           BULK: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Write the rows of a tile, if it has any; a tile without keys owns no buffer."""
    block, q_start, q_len, mine = to
    out_row, out_head, lse_row, lse_head = strides
    if mine < q_len:
        if BULK:
            if seen > 0:
                _finish(acc, top, total, out, out_desc, lse, sinks, buffer, block, q_start, q_len, mine,
                        out_row, out_head, lse_row, lse_head, DV, D_V, PACK, SINKS, LSE, True, S_LAYOUT, O_LAYOUT)
            else:
                _blank(out, lse, block, q_start, q_len, mine, out_row, out_head, lse_row, lse_head,
                       DV, D_V, PACK, LSE, S_LAYOUT)
        else:
            _finish(acc, top, total, out, out_desc, lse, sinks, buffer, block, q_start, q_len, mine,
                    out_row, out_head, lse_row, lse_head, DV, D_V, PACK, SINKS, LSE, False, S_LAYOUT, O_LAYOUT)


@gluon_jit
def _attend_tile(s, acc, top, step, count, free_from, free_to, own, left, k_len, window, factor, cap,
                 q_buf, q_empty_before, served, k_bufs, v_bufs, k_full, v_full, k_freed, turns,
                 W: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
                 D_V: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
                 FUSED: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr, BULK: gl.constexpr,
                 S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Go through a tile's key blocks, the last first, scores of a block with the values of the one before.

    BULK, the stage of the queries before these is given back when the copy engine has taken that tile's rows from it.
    """
    dtype: gl.constexpr = v_bufs.dtype
    stage = step % STAGES
    s = _soften(s, factor, cap, CAP, FUSED)
    start = left + (count - 1) * BLOCK_N
    s = _mask(s, own, start, window, BLOCK_N, WINDOW, S_LAYOUT)
    weights, top, shrink = _weigh(s, top, factor, FUSED, True)
    total = _sums(weights, BLOCK_N)
    pairs = _pack(weights, dtype, BLOCK_N)
    if BULK:
        hopper.tma.store_wait(0)
        hopper.mbarrier.arrive(q_empty_before, count=1, pred=served > 0)
    if start + BLOCK_N > k_len:
        hopper.mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        _clean(v_bufs.index(stage), k_len - start, BLOCK_N, D_V)
    step += 1
    if CAUSAL:
        acc, pairs, top, total, shrink, step = _walk(
            acc, pairs, top, total, shrink, step, gl.minimum(free_to, count - 1), count - 1, own, left, window, factor,
            cap, q_buf, k_bufs, v_bufs, k_full, v_full, k_freed, turns, W, CONSUMERS, STAGES, BLOCK_N,
            WINDOW, CAP, FUSED, True, TURNS, LATE, S_LAYOUT, O_LAYOUT, P_LAYOUT)
    acc, pairs, top, total, shrink, step = _walk(
        acc, pairs, top, total, shrink, step, free_from, gl.minimum(free_to, count - 1), own, left, window, factor,
        cap, q_buf, k_bufs, v_bufs, k_full, v_full, k_freed, turns, W, CONSUMERS, STAGES, BLOCK_N,
        WINDOW, CAP, FUSED, False, TURNS, LATE, S_LAYOUT, O_LAYOUT, P_LAYOUT)
    if WINDOW:
        acc, pairs, top, total, shrink, step = _walk(
            acc, pairs, top, total, shrink, step, 0, gl.minimum(free_from, count - 1), own, left, window, factor,
            cap, q_buf, k_bufs, v_bufs, k_full, v_full, k_freed, turns, W, CONSUMERS, STAGES, BLOCK_N,
            WINDOW, CAP, FUSED, True, TURNS, LATE, S_LAYOUT, O_LAYOUT, P_LAYOUT)
    if LATE:
        acc = _scale_rows(acc, shrink, O_LAYOUT)
    stage = (step - 1) % STAGES
    hopper.mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
    acc = hopper.warpgroup_mma(_unpack(pairs, dtype, BLOCK_N, P_LAYOUT), v_bufs.index(stage), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    return acc, top, gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S_LAYOUT)), step


@gluon_jit
def _free(first, q_len, shift, left, count, k_len, window, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
          CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Return from and to which block all rows of a tile see every key."""
    seen_to = gl.minimum(first + shift + 1, k_len) if CAUSAL else k_len
    free_to = gl.maximum(0, gl.minimum(count, (seen_to - left) // BLOCK_N))
    free_from = 0
    if WINDOW:
        seen_from = gl.minimum(first + TOKENS, q_len) - 1 + shift - window - left
        free_from = gl.minimum(free_to, gl.maximum(0, seen_from + BLOCK_N - 1) // BLOCK_N)
    return free_from, free_to


@gluon_jit
def _nothing(D_V: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Return a tile's sum of values, highest score and sum of weights before its first block."""
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    return gl.zeros([64, D_V], gl.float32, O_LAYOUT), top, gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))


@gluon_jit
def _last_keys(mine, shift, k_len, PACK: gl.constexpr, CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Return each row's last key.

    Rows behind the sequence's last have nothing to hide but what lies behind its last key.
    """
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    return gl.minimum(mine + row // PACK + shift, k_len - 1) if CAUSAL else row * 0 + k_len - 1


@gluon_jit
def _first_scores(step, served, rings, W: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr,
                  STAGES: gl.constexpr, BLOCK_N: gl.constexpr, TURNS: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Return the scores of a tile's last block of keys."""
    q_bufs, k_bufs, _v, q_full, _e, k_full, _f, k_freed, turns, _j, _jf, _je = rings
    of = served % Q_STAGES * CONSUMERS + W
    stage = step % STAGES
    hopper.mbarrier.wait(q_full.index(of), (served // Q_STAGES) & 1)
    hopper.mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    if TURNS:
        hopper.mbarrier.wait(turns.index(W), (step & 1) ^ (1 if W == 0 else 0))
    q_buf = q_bufs.index(of).reshape([64, q_bufs.shape[3]])
    s = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = hopper.warpgroup_mma(q_buf, k_bufs.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    if TURNS:
        hopper.mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)
    s = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[s])
    hopper.mbarrier.arrive(k_freed.index(stage), count=1)
    return s


@gluon_jit
def _consume(rings, work, factors, strides, out, out_desc, lse, sinks,
             W: gl.constexpr, DV: gl.constexpr, D_V: gl.constexpr, HEADS: gl.constexpr, PACK: gl.constexpr,
             CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
             CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, FUSED: gl.constexpr, SINKS: gl.constexpr,
             LSE: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr, BULK: gl.constexpr):
    """Compute the W-th 64 rows of each tile.

    BULK, rows leave through the buffer of their queries, which is free again only when the copy engine has read it:
    during the next tile.
    """
    TOKENS: gl.constexpr = CONSUMERS * 64 // PACK
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    q_bufs, k_bufs, v_bufs, _q_full, q_empty, k_full, v_full, k_freed, turns, jobs, j_full, j_empty = rings
    tiles, window = work[3], work[5]
    step, turn, served = 0, 0, 0
    job = _next(turn, jobs, j_full, j_empty)
    block, first, left, count, base, end, q_start, q_len, k_start, k_len = _open(
        job, job * 0, job * 0, job * 0, job * 0, job * 0, job * 0, work, HEADS, TOKENS, BLOCK_N, CAUSAL, WINDOW)
    while job < tiles * HEADS:
        mine = first + W * (64 // PACK)
        stage = served % Q_STAGES * CONSUMERS + W
        acc, top, total = _nothing(D_V, S_LAYOUT, O_LAYOUT)
        if count > 0:
            shift = k_len - q_len
            own = _last_keys(mine, shift, k_len, PACK, CAUSAL, S_LAYOUT)
            free_from, free_to = _free(first, q_len, shift, left, count, k_len, window, TOKENS, BLOCK_N, CAUSAL, WINDOW)
            s = _first_scores(step, served, rings, W, CONSUMERS, Q_STAGES, STAGES, BLOCK_N, TURNS, S_LAYOUT)
            acc, top, total, step = _attend_tile(
                s, acc, top, step, count, free_from, free_to, own, left, k_len, window, factors[0], factors[1],
                q_bufs.index(stage).reshape([64, q_bufs.shape[3]]),
                q_empty.index((served + Q_STAGES - 1) % Q_STAGES * CONSUMERS + W), served,
                k_bufs, v_bufs, k_full, v_full, k_freed, turns, W, CONSUMERS, STAGES, BLOCK_N, D_V,
                CAUSAL, WINDOW, CAP, FUSED, TURNS, LATE, BULK, S_LAYOUT, O_LAYOUT, P_LAYOUT)
            if not BULK:
                hopper.mbarrier.arrive(q_empty.index(stage), count=1)
            served += 1
        to, seen = (block, q_start, q_len, mine), count
        turn += 1
        job = _next(turn, jobs, j_full, j_empty)
        block, first, left, count, base, end, q_start, q_len, k_start, k_len = _open(
            job, base, end, q_start, q_len, k_start, k_len, work, HEADS, TOKENS, BLOCK_N, CAUSAL, WINDOW)
        _write(acc, top, total, seen, out, out_desc, lse, sinks, q_bufs.index(stage), to, strides,
               DV, D_V, PACK, SINKS, LSE, BULK, S_LAYOUT, O_LAYOUT)
    if BULK:
        hopper.tma.store_wait(0)


@gluon_jit
def _barriers(ARRIVALS: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT barriers that complete after as many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        hopper.mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon_jit(do_not_specialize=("sequences", "tiles", "rows", "window"))
def _attend(
    q_desc, k_desc, v_desc, out_desc, out, lse, sinks, cu_q, cu_k, taken, sequences, tiles, rows, window, factor, cap,
    out_row, out_head, lse_row, lse_head,
    DV: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    FUSED: gl.constexpr, SINKS: gl.constexpr,
    LSE: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr, BULK: gl.constexpr, REGISTERS: gl.constexpr,
):
    """Work through tiles; the second axis of the grid counts groups of ``HEADS`` blocks of heads.

    ``q_desc, out_desc [tokens, heads, D]`` in boxes of 64 rows, ``k_desc, v_desc [keys, heads, D]`` in boxes of one
    head. With a window every row's keys end at itself. ``tiles`` is ``rows // TOKENS + sequences + 1``. A program
    that is done takes the next tile, counted in ``taken``, zeros at first.
    """
    D: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    D_V: gl.constexpr = v_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_bufs = gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, 64 // PACK, PACK, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_N, D], gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype))
    v_bufs = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_N, D_V], gl.NVMMASharedLayout.get_default_for([BLOCK_N, D_V], dtype))
    q_full = _barriers(1, Q_STAGES * CONSUMERS)
    q_empty = _barriers(1, Q_STAGES * CONSUMERS)
    k_full = _barriers(1, STAGES)
    v_full = _barriers(1, STAGES)
    k_freed = _barriers(CONSUMERS, STAGES)
    turns = _barriers(1, CONSUMERS)
    jobs = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    j_full = _barriers(1, 2)
    j_empty = _barriers(CONSUMERS, 2)
    hopper.fence_async_shared()
    rings = (q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, v_full, k_freed, turns, jobs, j_full, j_empty)
    work = (cu_q, cu_k, sequences, tiles, rows, window, taken)
    factors = (factor, cap)
    strides = (out_row, out_head, lse_row, lse_head)
    # Constants stay constants in a partition only where the call itself spells them out.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (rings, work, factors, strides, out, out_desc, lse, sinks, gl.constexpr(0), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS,
                        LATE, BULK)),
            (_consume, (rings, work, factors, strides, out, out_desc, lse, sinks, gl.constexpr(1), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS,
                        LATE, BULK)),
            (_produce, (q_desc, k_desc, v_desc, rings, work, HEADS, GROUP, PACK, CONSUMERS, Q_STAGES, STAGES,
                        BLOCK_N, CAUSAL, WINDOW)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (rings, work, factors, strides, out, out_desc, lse, sinks, gl.constexpr(0), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS,
                        LATE, BULK)),
            (_consume, (rings, work, factors, strides, out, out_desc, lse, sinks, gl.constexpr(1), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS,
                        LATE, BULK)),
            (_consume, (rings, work, factors, strides, out, out_desc, lse, sinks, gl.constexpr(2), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS,
                        LATE, BULK)),
            (_produce, (q_desc, k_desc, v_desc, rings, work, HEADS, GROUP, PACK, CONSUMERS, Q_STAGES, STAGES,
                        BLOCK_N, CAUSAL, WINDOW)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
# fmt: on

# Launching a program puts Gluon's own object in the place of its name; here the declaration stays.
DECLARED: Final = {"attend": _attend}
