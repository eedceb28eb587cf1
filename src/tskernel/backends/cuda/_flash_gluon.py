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
def _turn_of(turn, tiles, HEADS: gl.constexpr):
    """Return the tile and the block of heads of a program's turn, and whether there is one.

    The last tiles see the most keys: first come, first served, back and forth over the programs, so that none always
    gets the longest. ``HEADS`` blocks of heads go side by side: what they read stays in the L2 cache.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    index = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    return tiles - 1 - index // HEADS, gl.program_id(1) * HEADS + index % HEADS, index < tiles * HEADS


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
def _fetch(desc, row, head, full, buffers, stage):
    """Copy rows of one head into a stage of a ring."""
    hopper.mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(desc, [row, head, 0], full.index(stage), buffers.index(stage))


@gluon_jit
def _produce(q_desc, k_desc, v_desc, rings, work,
             HEADS: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, CONSUMERS: gl.constexpr,
             Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
             WINDOW: gl.constexpr):
    """Copy the queries of each tile, then its keys and values from the last block to the first, keys one ahead."""
    TOKENS: gl.constexpr = CONSUMERS * 64 // PACK
    q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, v_full, freed, _turns = rings
    cu_q, cu_k, sequences, tiles, turns_each, rows, window = work
    step = 0
    served = 0
    base = 0
    end = 0
    q_start = 0
    q_len = 0
    k_start = 0
    k_len = 0
    for turn in range(0, turns_each):
        tile, block, exists = _turn_of(turn, tiles, HEADS)
        if (tile < base) | (tile >= end):
            base, end, q_start, q_len, k_start, k_len = _search(tile, cu_q, cu_k, sequences, rows, TOKENS)
        first = (tile - base) * TOKENS
        left, count = _keys(first, q_len, k_len, exists, window, TOKENS, BLOCK_N, CAUSAL, WINDOW)
        if count > 0:
            kv_head = block * PACK // GROUP
            for w in gl.static_range(CONSUMERS):
                stage = served % Q_STAGES * CONSUMERS + w
                hopper.mbarrier.wait(q_empty.index(stage), ((served // Q_STAGES) & 1) ^ 1)
                _fetch(q_desc, q_start + first + w * (64 // PACK), block * PACK, q_full, q_bufs, stage)
            served += 1
            at = k_start + left + (count - 1) * BLOCK_N
            hopper.mbarrier.wait(freed.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
            _fetch(k_desc, at, kv_head, k_full, k_bufs, step % STAGES)
            for _ in range(1, count):
                ahead = step + 1
                # What frees the keys' stage is done with the values before it too.
                hopper.mbarrier.wait(freed.index(ahead % STAGES), ((ahead // STAGES) & 1) ^ 1)
                _fetch(k_desc, at - BLOCK_N, kv_head, k_full, k_bufs, ahead % STAGES)
                _fetch(v_desc, at, kv_head, v_full, v_bufs, step % STAGES)
                at -= BLOCK_N
                step = ahead
            hopper.mbarrier.wait(freed.index((step + 1) % STAGES), (((step + 1) // STAGES) & 1) ^ 1)
            _fetch(v_desc, at, kv_head, v_full, v_bufs, step % STAGES)
            step += 1


@gluon_jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon_jit
def _sums(weights, BLOCK_N: gl.constexpr):
    """Sum each row's weights within a thread: the four threads of a row meet only once, behind the last block."""
    return gl.sum(gl.sum(gl.reshape(weights, [64, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon_jit
def _hold(total):
    """Return sums as they are, but not before they are there.

    The assembler would move a wait for a product ahead of the softmax that is to run beside it. It keeps a wait behind
    an instruction with an effect: here a sleep that never comes, since the sums are not negative.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; setp.lt.f32 never, $1, 0f00000000; @never nanosleep.u32 1; mov.f32 $0, $1; }", "=f,f",
        [total], dtype=gl.float32, is_pure=False, pack=1)


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
def _walk(acc, pairs, top, total, step, blocks_from, blocks_to, own, left, window, factor, cap,
          q_buf, k_bufs, v_bufs, k_full, v_full, freed, turns,
          W: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr,
          CAP: gl.constexpr, FUSED: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr, HOLD: gl.constexpr,
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
        nothing = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
        s = hopper.warpgroup_mma(q_buf, k_bufs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        hopper.mbarrier.wait(v_full.index(last), ((step - 1) // STAGES) & 1)
        acc = hopper.warpgroup_mma(_unpack(pairs, dtype, BLOCK_N, P_LAYOUT), v_bufs.index(last), acc, is_async=True)
        if TURNS:
            hopper.mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)
        if HOLD:
            s = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[s])
        else:
            s, acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[s, acc])
            hopper.mbarrier.arrive(freed.index(stage), count=1)
        s = _soften(s, factor, cap, CAP, FUSED)
        if MASKED:
            s = _mask(s, own, left + n * BLOCK_N, window, BLOCK_N, WINDOW, S_LAYOUT)
        weights, top, shrink = _weigh(s, top, factor, FUSED, MASKED)
        fade = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))
        total = total * fade[:, None] + _sums(weights, BLOCK_N)
        pairs = _pack(weights, dtype, BLOCK_N)
        if HOLD:
            total = _hold(total)
            acc, pairs = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc, pairs])
            hopper.mbarrier.arrive(freed.index(stage), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        step += 1
    return acc, pairs, top, total, step


@gluon_jit
def _finish(acc, top, total, out, lse, sinks, block, q_start, q_len, mine, out_row, out_head, lse_row, lse_head,
            DV: gl.constexpr, D_V: gl.constexpr, PACK: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
            S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
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
    share = 1.0 / gl.where(total == 0.0, 1.0, total)
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))[:, None]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_V, D_V // 8], [4, 1], [1, 0])
    value = gl.convert_layout(acc.to(out.dtype.element_ty), WIDE)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    token = mine + row // PACK
    column = gl.arange(0, D_V, layout=gl.SliceLayout(0, WIDE))
    to = (q_start + token).to(gl.int64) * out_row + (block * PACK + row % PACK) * out_head
    gl.store(out + to[:, None] + column[None, :], value, mask=(token < q_len)[:, None] & (column < DV)[None, :])


@gluon_jit
def _attend_tile(acc, top, step, count, free_from, free_to, own, left, k_len, window, factor, cap,
                 q_buf, k_bufs, v_bufs, k_full, v_full, freed, turns,
                 W: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
                 D_V: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
                 FUSED: gl.constexpr, TURNS: gl.constexpr, HOLD: gl.constexpr,
                 S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Go through a tile's key blocks, the last first, scores of a block with the values of the one before."""
    dtype: gl.constexpr = v_bufs.dtype
    stage = step % STAGES
    phase = (step // STAGES) & 1
    hopper.mbarrier.wait(k_full.index(stage), phase)
    if TURNS:
        hopper.mbarrier.wait(turns.index(W), (step & 1) ^ (1 if W == 0 else 0))
    nothing = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = hopper.warpgroup_mma(q_buf, k_bufs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if TURNS:
        hopper.mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)
    s = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[s])
    hopper.mbarrier.arrive(freed.index(stage), count=1)
    s = _soften(s, factor, cap, CAP, FUSED)
    start = left + (count - 1) * BLOCK_N
    s = _mask(s, own, start, window, BLOCK_N, WINDOW, S_LAYOUT)
    weights, top, _shrink = _weigh(s, top, factor, FUSED, True)
    total = _sums(weights, BLOCK_N)
    pairs = _pack(weights, dtype, BLOCK_N)
    if start + BLOCK_N > k_len:
        hopper.mbarrier.wait(v_full.index(stage), phase)
        _clean(v_bufs.index(stage), k_len - start, BLOCK_N, D_V)
    step += 1
    if CAUSAL:
        acc, pairs, top, total, step = _walk(
            acc, pairs, top, total, step, gl.minimum(free_to, count - 1), count - 1, own, left, window, factor, cap,
            q_buf, k_bufs, v_bufs, k_full, v_full, freed, turns, W, CONSUMERS, STAGES, BLOCK_N,
            WINDOW, CAP, FUSED, True, TURNS, HOLD, S_LAYOUT, O_LAYOUT, P_LAYOUT)
    acc, pairs, top, total, step = _walk(
        acc, pairs, top, total, step, free_from, gl.minimum(free_to, count - 1), own, left, window, factor, cap,
        q_buf, k_bufs, v_bufs, k_full, v_full, freed, turns, W, CONSUMERS, STAGES, BLOCK_N,
        WINDOW, CAP, FUSED, False, TURNS, HOLD, S_LAYOUT, O_LAYOUT, P_LAYOUT)
    if WINDOW:
        acc, pairs, top, total, step = _walk(
            acc, pairs, top, total, step, 0, gl.minimum(free_from, count - 1), own, left, window, factor, cap,
            q_buf, k_bufs, v_bufs, k_full, v_full, freed, turns, W, CONSUMERS, STAGES, BLOCK_N,
            WINDOW, CAP, FUSED, True, TURNS, HOLD, S_LAYOUT, O_LAYOUT, P_LAYOUT)
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
def _consume(rings, work, factors, strides, out, lse, sinks,
             W: gl.constexpr, DV: gl.constexpr, D_V: gl.constexpr, HEADS: gl.constexpr, PACK: gl.constexpr,
             CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
             CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, FUSED: gl.constexpr, SINKS: gl.constexpr,
             LSE: gl.constexpr, TURNS: gl.constexpr, HOLD: gl.constexpr):
    """Compute the W-th 64 rows of each tile."""
    TOKENS: gl.constexpr = CONSUMERS * 64 // PACK
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, v_full, freed, turns = rings
    cu_q, cu_k, sequences, tiles, turns_each, rows, window = work
    factor, cap = factors
    out_row, out_head, lse_row, lse_head = strides
    step = 0
    served = 0
    base = 0
    end = 0
    q_start = 0
    q_len = 0
    _k_start = 0
    k_len = 0
    for turn in range(0, turns_each):
        tile, block, exists = _turn_of(turn, tiles, HEADS)
        if (tile < base) | (tile >= end):
            base, end, q_start, q_len, _k_start, k_len = _search(tile, cu_q, cu_k, sequences, rows, TOKENS)
        first = (tile - base) * TOKENS
        left, count = _keys(first, q_len, k_len, exists, window, TOKENS, BLOCK_N, CAUSAL, WINDOW)
        mine = first + W * (64 // PACK)
        acc = gl.zeros([64, D_V], gl.float32, O_LAYOUT)
        top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        if count > 0:
            shift = k_len - q_len
            row = gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
            # Rows behind the sequence's last have nothing to hide but what lies behind its last key.
            own = gl.minimum(mine + row // PACK + shift, k_len - 1) if CAUSAL else row * 0 + k_len - 1
            free_from, free_to = _free(first, q_len, shift, left, count, k_len, window, TOKENS, BLOCK_N, CAUSAL, WINDOW)
            stage = served % Q_STAGES * CONSUMERS + W
            hopper.mbarrier.wait(q_full.index(stage), (served // Q_STAGES) & 1)
            q_buf = q_bufs.index(stage).reshape([64, q_bufs.shape[3]])
            acc, top, total, step = _attend_tile(
                acc, top, step, count, free_from, free_to, own, left, k_len, window, factor, cap,
                q_buf, k_bufs, v_bufs, k_full, v_full, freed, turns, W, CONSUMERS, STAGES, BLOCK_N, D_V,
                CAUSAL, WINDOW, CAP, FUSED, TURNS, HOLD, S_LAYOUT, O_LAYOUT, P_LAYOUT)
            hopper.mbarrier.arrive(q_empty.index(stage), count=1)
            served += 1
        if exists & (mine < q_len):
            _finish(acc, top, total, out, lse, sinks, block, q_start, q_len, mine,
                    out_row, out_head, lse_row, lse_head, DV, D_V, PACK, SINKS, LSE, S_LAYOUT, O_LAYOUT)


@gluon_jit
def _barriers(ARRIVALS: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT barriers that complete after as many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        hopper.mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon_jit(do_not_specialize=("sequences", "tiles", "turns_each", "rows", "window"))
def _attend(
    q_desc, k_desc, v_desc, out, lse, sinks, cu_q, cu_k, sequences, tiles, turns_each, rows, window, factor, cap,
    out_row, out_head, lse_row, lse_head,
    DV: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    FUSED: gl.constexpr, SINKS: gl.constexpr,
    LSE: gl.constexpr, TURNS: gl.constexpr, HOLD: gl.constexpr, REGISTERS: gl.constexpr,
):
    """Work through this program's turns; the second axis of the grid counts groups of ``HEADS`` blocks of heads.

    ``q_desc [tokens, heads, D]`` in boxes of 64 rows, ``k_desc, v_desc [keys, heads, D]`` in boxes of one head. With a
    window every row's keys end at itself. ``tiles`` is ``rows // TOKENS + sequences + 1``.
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
    freed = _barriers(CONSUMERS, STAGES)
    turns = _barriers(1, CONSUMERS)
    hopper.fence_async_shared()
    rings = (q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, v_full, freed, turns)
    work = (cu_q, cu_k, sequences, tiles, turns_each, rows, window)
    factors = (factor, cap)
    strides = (out_row, out_head, lse_row, lse_head)
    # Constants stay constants in a partition only where the call itself spells them out.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (rings, work, factors, strides, out, lse, sinks, gl.constexpr(0), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS, HOLD)),
            (_consume, (rings, work, factors, strides, out, lse, sinks, gl.constexpr(1), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS, HOLD)),
            (_produce, (q_desc, k_desc, v_desc, rings, work, HEADS, GROUP, PACK, CONSUMERS, Q_STAGES, STAGES,
                        BLOCK_N, CAUSAL, WINDOW)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (rings, work, factors, strides, out, lse, sinks, gl.constexpr(0), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS, HOLD)),
            (_consume, (rings, work, factors, strides, out, lse, sinks, gl.constexpr(1), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS, HOLD)),
            (_consume, (rings, work, factors, strides, out, lse, sinks, gl.constexpr(2), DV, D_V, HEADS, PACK,
                        CONSUMERS, Q_STAGES, STAGES, BLOCK_N, CAUSAL, WINDOW, CAP, FUSED, SINKS, LSE, TURNS, HOLD)),
            (_produce, (q_desc, k_desc, v_desc, rings, work, HEADS, GROUP, PACK, CONSUMERS, Q_STAGES, STAGES,
                        BLOCK_N, CAUSAL, WINDOW)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
# fmt: on

# Launching a program puts Gluon's own object in the place of its name; here the declaration stays.
DECLARED: Final = {"attend": _attend}
