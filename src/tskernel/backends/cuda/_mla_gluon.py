# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
"""Absorbed latent attention on Hopper in Gluon: TMA loads, asynchronous warpgroup products, two consumer warpgroups.

A program owns 64 query rows (heads of one or more tokens) at a time and walks over blocks of 64 keys. A row's result is
512 wide: 64 x 512 in fp32 fill the registers of two warpgroups, so each warpgroup keeps one half of the columns. They
take turns with the scores: warpgroup 0 computes those of the even blocks, warpgroup 1 those of the odd ones, and hands
the weights to the other through shared memory, into the rotary part of the block's own keys, which nobody needs any
more. So one computes scores while the other multiplies, and a row's maximum passes back and forth between them.
A third partition, one warp, loads: each block is two halves of 256 columns and the rotary part, with a barrier for
either half, so that a half is loaded again as soon as its reader is done.

The grid is one program per multiprocessor. All blocks of all requests are shared out on the device from the true
lengths (``_share``), so that the host reads none of them; rows that were cut are joined by a second program
(``join``), which also writes the rows of empty requests and learns from ``shares`` how rows were cut.

A part of a cut row is kept in fp16, as multiples of a fp32 factor per row and half of the columns: half of the bytes of
fp32, and 11 bits for all that is at least 2^-29 of the half row's largest value, whatever that is.

Source: Dao 2023 (online softmax, work partitioning), https://arxiv.org/abs/2307.08691; Shah et al. 2024 (warp
specialisation), https://arxiv.org/abs/2407.08608; DeepSeek-AI 2025, the published description of FlashMLA's schedule
(two warpgroups that split the output's columns and alternate the scores).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tskernel.backends.lazy_triton import gluon_jit

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper


# fmt: off
@gluon_jit
def _plus(a, b):
    return a + b


@gluon_jit
def _let_join_start():
    """Let the programs of the join be placed as soon as multiprocessors have room."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _wait_for_parts():
    """Wait until all that the launch before wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _keep_loads_above():
    """Keep the assembler from issuing loads later, behind the wait for others, to save registers."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _ceil(a, b):
    return (a + b - 1) // b


@gluon_jit
def _blocks(length, columns, PAGE: gl.constexpr):
    """Return how many blocks of 64 keys a request has; a wrong length stays inside the table."""
    return (gl.minimum(gl.maximum(length, 0), columns * PAGE) + 63) // 64


@gluon_jit
def _lengths(lens, batch, columns, PAGE: gl.constexpr, BLOCK_B: gl.constexpr):
    """Return the blocks of every request; up to 512 requests each of four warps holds all, so no sum crosses warps."""
    EACH: gl.constexpr = BLOCK_B // 32 if BLOCK_B <= 512 else 1
    seq = gl.arange(0, BLOCK_B, gl.BlockedLayout([EACH], [32], [4], [0]))
    return _blocks(gl.load(lens + seq, mask=seq < batch, other=0), columns, PAGE)


@gluon_jit
def _share(n, batch, shares, tiles, slots, BLOCK_B: gl.constexpr, LEAST: gl.constexpr, EXTRA: gl.constexpr):
    """Decide how the ``n`` blocks of each request's rows are shared among ``slots`` programs, and tell the join.

    Chunked: the keys of a tile are cut into equal chunks of at most ``size`` blocks, one chunk per program. Flat: all
    blocks stand in one line, of which a program takes ``size``; it may start and end inside a tile, which costs about
    EXTRA blocks more. Returns chunked, size, and the running sum of chunks or blocks over the requests, which places
    a request. ``shares`` gets the size, negative if chunked, then 0 and that sum: where each request starts.
    """
    total, most = gl.sum(n, 0) * tiles, gl.max(n, 0)
    items = gl.maximum(gl.sum((n > 0).to(gl.int32), 0) * tiles, 1)
    fits = items <= slots
    even = gl.where(fits, _ceil(most, gl.maximum(slots // items, 1)), most * _ceil(items, slots))
    loose = gl.where(items < slots, _ceil(total, gl.maximum(slots - items, 1)), even)
    chunk = gl.maximum(gl.minimum(even, loose), LEAST)
    flat = gl.maximum(_ceil(total, slots), LEAST)
    chunked = fits & (chunk <= flat + EXTRA)
    size = gl.where(chunked, chunk, gl.where(even <= flat + EXTRA, gl.maximum(even, LEAST), flat))
    ends = gl.associative_scan(gl.where(chunked, _ceil(n, size), n) * tiles, 0, _plus)
    if gl.program_id(0) == 0:
        EACH: gl.constexpr = BLOCK_B // 32 if BLOCK_B <= 512 else 1
        seq = gl.arange(0, BLOCK_B, gl.BlockedLayout([EACH], [32], [4], [0]))
        gl.store(shares, gl.where(chunked, -size, size))
        gl.store(shares + 1, 0)
        gl.store(shares + 2 + seq, ends, mask=seq < batch)
    return chunked, size, ends


@gluon_jit
def _find(ends, at):
    """Return the request that holds place ``at`` of the line, and where it starts."""
    passed = ends <= at
    return gl.sum(passed.to(gl.int32), 0), gl.max(gl.where(passed, ends, 0), 0)


@gluon_jit
def _place(ends, at, lens, columns, tiles, chunked, size, PAGE: gl.constexpr):
    """Return the tile at place ``at`` (counted over all requests), its blocks, its chunks, and the place inside it."""
    seq, start = _find(ends, at)
    n = _blocks(gl.load(lens + seq), columns, PAGE)
    cuts = gl.where(chunked, _ceil(n, size), n)
    rest = at - start
    return seq * tiles + rest // cuts, n, cuts, rest % cuts


@gluon_jit
def _work(program, ends, last, lens, columns, tiles, chunked, size, PAGE: gl.constexpr):
    """Return a program's share: first tile and block, last tile and the end of its blocks.

    Without any the last tile stands before the first.
    """
    first = gl.where(chunked, program, program * size)
    item0, lo0, item1, hi1 = 0, 0, -1, 0
    if first < last:
        item0, n0, cuts0, in0 = _place(ends, first, lens, columns, tiles, chunked, size, PAGE)
        item1, n1, cuts1, in1 = item0, n0, cuts0, in0
        if not chunked:
            final = gl.minimum(first + size, last) - 1
            item1, n1, cuts1, in1 = _place(ends, final, lens, columns, tiles, chunked, size, PAGE)
        lo0 = gl.where(chunked, in0 * n0 // cuts0, in0)
        hi1 = gl.where(chunked, (in1 + 1) * n1 // cuts1, in1 + 1)
    return item0, lo0, item1, hi1


@gluon_jit
def _piece(item, item0, lo0, item1, hi1, lens, columns, tiles, PAGE: gl.constexpr):
    """Return request, tile, keys, blocks, and the blocks ``lo`` to ``hi`` that this program takes of a tile."""
    seq, tile = item // tiles, item % tiles
    keys = gl.minimum(gl.maximum(gl.load(lens + seq), 0), columns * PAGE)
    blocks = (keys + 63) // 64
    lo = gl.where(item == item0, lo0, 0)
    hi = gl.where(item == item1, hi1, blocks)
    return seq, tile, keys, blocks, lo, hi


@gluon_jit
def _pages(table, n, count, PAGE: gl.constexpr):
    """Return the pages of block ``n``, up to four; -1 behind the last of ``count``, whose entries mean nothing."""
    if PAGE >= 64:
        page = gl.load(table + n * 64 // PAGE)
        return page, page, page, page
    else:
        at = n * (64 // PAGE)
        page0 = gl.load(table + at)
        page1 = gl.load(table + at + 1, mask=at + 1 < count, other=-1)
        if PAGE == 32:
            return page0, page1, page1, page1
        else:
            page2 = gl.load(table + at + 2, mask=at + 2 < count, other=-1)
            return page0, page1, page2, gl.load(table + at + 3, mask=at + 3 < count, other=-1)


@gluon_jit
def _load(kv, page0, page1, page2, page3, n, to, bar, COLUMN: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr):
    """Load WIDTH columns of a block's 64 keys; a page number outside the cache loads zeros."""
    if PAGE >= 64:
        hopper.tma.async_copy_global_to_shared(
            kv, [page0, n * 64 % PAGE, COLUMN], bar, to._reinterpret(kv.dtype, [1, 64, WIDTH], kv.layout))
    else:
        PARTS: gl.constexpr = 64 // PAGE
        boxes = to._reinterpret(kv.dtype, [WIDTH // 64 * PARTS, 1, PAGE, 64], kv.layout)
        pages = (page0, page1, page2, page3)
        for box in gl.static_range(WIDTH // 64):
            for part in gl.static_range(PARTS):
                hopper.tma.async_copy_global_to_shared(
                    kv, [pages[part], 0, COLUMN + 64 * box], bar, boxes.index(box * PARTS + part))


@gluon_jit
def _produce(
    q, q_rope, kv, kv_rope, q_s, q_rope_s, kv_s, rope_s, full, empty, q_bar, lens, table, table_row, columns, tiles,
    lanes, rows, item0, lo0, item1, hi1, PAGE: gl.constexpr,
):
    """Load queries and keys, each as soon as its place is free."""
    piece, use0, use1 = 0, 0, 0
    for item in range(item0, item1 + 1):
        seq, tile, keys, _all, lo, hi = _piece(item, item0, lo0, item1, hi1, lens, columns, tiles, PAGE)
        tile = tile * lanes + gl.program_id(0) % lanes
        if hi > lo:
            count = (keys + PAGE - 1) // PAGE
            own = table + seq.to(gl.int64) * table_row
            next0, next1, next2, next3 = _pages(own, lo, count, PAGE)
            hopper.mbarrier.wait(q_bar.index(1), (piece & 1) ^ 1)
            hopper.mbarrier.expect(q_bar.index(0), 64 * 576 * 2)
            row = seq * rows + tile * 64
            hopper.tma.async_copy_global_to_shared(q, [row, 0], q_bar.index(0), q_s.index(0))
            hopper.tma.async_copy_global_to_shared(q, [row, 256], q_bar.index(0), q_s.index(1))
            hopper.tma.async_copy_global_to_shared(q_rope, [row, 512], q_bar.index(0), q_rope_s.index(0))
            for n in range(lo, hi):
                page0, page1, page2, page3 = next0, next1, next2, next3
                # Under way while this block waits for its place.
                next0, next1, next2, next3 = _pages(own, gl.minimum(n + 1, hi - 1), count, PAGE)
                odd = (n - lo) & 1
                phase = (gl.where(odd == 1, use1, use0) & 1) ^ 1
                for half in gl.static_range(2):
                    bar = full.index(2 * odd + half)
                    hopper.mbarrier.wait(empty.index(2 * odd + half), phase)
                    hopper.mbarrier.expect(bar, 64 * 256 * 2 + half * 64 * 64 * 2)
                    _load(kv, page0, page1, page2, page3, n, kv_s.index(2 * odd + half), bar, 256 * half, 256, PAGE)
                    if half == 1:
                        # The other warpgroup reads weights from here; it is done when both halves are free.
                        _load(kv_rope, page0, page1, page2, page3, n, rope_s.index(odd), bar, 512, 64, PAGE)
                use0 += 1 - odd
                use1 += odd
            piece += 1


@gluon_jit
def _clear_tail(v, count, side: gl.constexpr):
    """Zero the values behind the last key: unused slots may hold NaN, and a weight of 0 would not remove it."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inside = (gl.arange(0, 64, gl.SliceLayout(1, ROWS)) < count)[:, None]
    boxes = v._reinterpret(v.dtype, [4, 64, 64], v.layout)
    for box in gl.static_range(4):
        x = boxes.index(box).load(ROWS)
        boxes.index(box).store(gl.where(inside, x, gl.zeros_like(x)))
    hopper.fence_async_shared()


@gluon_jit
def _shrink(acc, total, top, new):
    """Rescale a running sum and result to a new maximum."""
    base = gl.where(new == float("-inf"), 0.0, new)
    factor = gl.exp2(top - base)
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    wide = gl.convert_layout(factor, gl.SliceLayout(1, W))
    return acc * wide[:, None], total * factor, base


@gluon_jit
def _zero(n):
    """Return 0 in a way that the compiler cannot see.

    Addresses that do not change in a loop would all be computed before it, and the registers that hold the 80 of them
    are needed for the result.
    """
    return n >> 30


@gluon_jit
def _own(
    acc, top, total, q_s, q_rope_s, kv_s, rope_s, top_s, full, empty, ready, phase, n, keys, sees, factor, q_len,
    SIDE: gl.constexpr,
):
    """Take a block of this warpgroup: its scores, its weights, which the other one gets too, half of its values."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    zero = _zero(n)
    s = gl.zeros([64, 64], gl.float32, S)
    hopper.mbarrier.wait(full.index(2 * SIDE), phase)
    k = kv_s.index(2 * SIDE + zero).permute((1, 0))
    s = hopper.warpgroup_mma(q_s.index(zero), k, s, use_acc=False, is_async=True)
    hopper.mbarrier.wait(full.index(2 * SIDE + 1), phase)
    k = kv_s.index(2 * SIDE + 1 + zero).permute((1, 0))
    s = hopper.warpgroup_mma(q_s.index(1 + zero), k, s, is_async=True)
    s = hopper.warpgroup_mma(q_rope_s.index(zero), rope_s.index(SIDE + zero).permute((1, 0)), s, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    s = s * factor
    if n * 64 + 64 > keys - q_len + 1:
        key = n * 64 + gl.arange(0, 64, gl.SliceLayout(0, S))
        s = gl.where(key[None, :] < sees[:, None], s, float("-inf"))
    new = gl.maximum(top, gl.max(s, 1))
    acc, total, base = _shrink(acc, total, top, new)
    p = gl.exp2(s - base[:, None])
    total += gl.sum(p, 1)
    weights = p.to(kv_s.dtype)
    top_s.index(SIDE).store(new)
    rope_s.index(SIDE).store(weights)
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(ready.index(SIDE), count=1)
    v = kv_s.index(3 * SIDE + zero)
    if n * 64 + 64 > keys:
        _clear_tail(v, keys - n * 64, SIDE)
    a = gl.convert_layout(weights, gl.DotOperandLayout(0, W, 2))
    acc = hopper.warpgroup_mma(a, v, acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    hopper.mbarrier.arrive(empty.index(3 * SIDE), count=1)
    return acc, new, total


@gluon_jit
def _other(acc, top, total, kv_s, rope_s, top_s, full, empty, ready, phase, n, keys, SIDE: gl.constexpr):
    """Take this warpgroup's share of a block whose weights the other one computes."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zero = _zero(n)
    hopper.mbarrier.wait(ready.index(1 - SIDE), phase)
    hopper.mbarrier.wait(full.index(2 - SIDE), phase)  # passed by the other already: this one sees the copy, too
    new = top_s.index(1 - SIDE).load(gl.SliceLayout(1, S))
    acc, total, _base = _shrink(acc, total, top, new)
    v = kv_s.index(2 - SIDE + zero)
    if n * 64 + 64 > keys:
        _clear_tail(v, keys - n * 64, SIDE)
    acc = hopper.warpgroup_mma(rope_s.index(1 - SIDE + zero), v, acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    hopper.mbarrier.arrive(empty.index(2 - SIDE), count=1)
    return acc, new, total


@gluon_jit
def _store(
    acc, top, total, out, lse, part, notes, seq, tile, whole, slot, rows, heads, out_seq, out_token, out_head,
    lse_seq, lse_token, lse_head, SIDE: gl.constexpr, LSE: gl.constexpr,
):
    """Write a tile's rows, or a part of them."""
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    # A thread of W has pairs of columns; here it has eight in a row, which it gets from its three neighbours.
    E: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 256])
    N: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    wide = gl.convert_layout(total, gl.SliceLayout(1, W))
    inverse = 1.0 / gl.where(wide == 0.0, 1.0, wide)
    # Rows behind the last one hold those of another request.
    row = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, E))
    column = 256 * SIDE + gl.arange(0, 256, gl.SliceLayout(0, E))
    row_n = tile * 64 + gl.arange(0, 64, N)
    log2_sum = gl.where(total == 0.0, float("-inf"), top + gl.log2(total))
    if whole:
        value = gl.convert_layout((acc * inverse[:, None]).to(out.dtype.element_ty), E)
        to = out + seq.to(gl.int64) * out_seq + (row // heads).to(gl.int64) * out_token + row % heads * out_head
        gl.store(to[:, None] + column[None, :], value, mask=(row < rows)[:, None])
        if LSE and SIDE == 0:
            at = lse + seq.to(gl.int64) * lse_seq + (row_n // heads).to(gl.int64) * lse_token + row_n % heads * lse_head
            gl.store(at, log2_sum * 0.6931471805599453, mask=row_n < rows)
    else:
        first = (slot - tile) * 64
        # The factor makes a row's largest value 2^15: nothing overflows, and 2^-29 of it is still a normal number.
        most = gl.maximum(gl.maximum(gl.max(acc, 1), -gl.min(acc, 1)), 1e-30)
        row_w = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
        factors = notes + (1 + SIDE) * gl.num_programs(0) * 128
        gl.store(factors + first + row_w, most * inverse * 2.0**-15, mask=row_w < rows)
        multiple = gl.convert_layout((acc * (32768.0 / most)[:, None]).to(gl.float16), E)
        own = part + ((first + row).to(gl.int64) * 512)[:, None] + column[None, :]
        gl.store(own, multiple, mask=(row < rows)[:, None])
        if SIDE == 0:
            gl.store(notes + first + row_n, log2_sum, mask=row_n < rows)


@gluon_jit
def _consume(
    q_s, q_rope_s, kv_s, rope_s, top_s, sum_s, full, empty, ready, q_bar, done, lens, out, lse, part, notes,
    columns, tiles, lanes, rows, heads, q_len, factor, out_seq, out_token, out_head, lse_seq, lse_token, lse_head,
    item0, lo0, item1, hi1, SIDE: gl.constexpr, PAGE: gl.constexpr, LSE: gl.constexpr,
):
    """Attend with one warpgroup: half of the columns, every other block's scores."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    N: gl.constexpr = gl.SliceLayout(1, S)
    piece, use0, use1 = 0, 0, 0
    for item in range(item0, item1 + 1):
        seq, tile, keys, blocks, lo, hi = _piece(item, item0, lo0, item1, hi1, lens, columns, tiles, PAGE)
        tile = tile * lanes + gl.program_id(0) % lanes
        if hi > lo:
            hopper.mbarrier.wait(q_bar.index(0), piece & 1)
            sees = keys - (q_len - 1) + (tile * 64 + gl.arange(0, 64, N)) // heads
            acc = gl.zeros([64, 256], gl.float32, W)
            top = gl.full([64], float("-inf"), gl.float32, N)
            total = gl.zeros([64], gl.float32, N)
            for n in range(lo, hi, 2):
                if SIDE == 0:
                    acc, top, total = _own(
                        acc, top, total, q_s, q_rope_s, kv_s, rope_s, top_s, full, empty, ready, use0 & 1, n, keys,
                        sees, factor, q_len, SIDE)
                else:
                    acc, top, total = _other(
                        acc, top, total, kv_s, rope_s, top_s, full, empty, ready, use0 & 1, n, keys, SIDE)
                use0 += 1
                if n + 1 < hi:
                    if SIDE == 0:
                        acc, top, total = _other(
                            acc, top, total, kv_s, rope_s, top_s, full, empty, ready, use1 & 1, n + 1, keys, SIDE)
                    else:
                        acc, top, total = _own(
                            acc, top, total, q_s, q_rope_s, kv_s, rope_s, top_s, full, empty, ready, use1 & 1, n + 1,
                            keys, sees, factor, q_len, SIDE)
                    use1 += 1
            hopper.mbarrier.arrive(q_bar.index(1), count=1)
            # Each warpgroup has the sums of its own blocks. Two places, by turns: the other may still read the last.
            turn = 2 * (piece & 1)
            sum_s.index(turn + SIDE).store(total)
            hopper.mbarrier.arrive(done.index(SIDE), count=1)
            hopper.mbarrier.wait(done.index(1 - SIDE), piece & 1)
            total += sum_s.index(turn + 1 - SIDE).load(N)
            whole = (lo == 0) & (hi == blocks)
            slot = 2 * gl.program_id(0) + (item != item0).to(gl.int32)
            _store(acc, top, total, out, lse, part, notes, seq, tile, whole, slot, rows, heads, out_seq, out_token,
                   out_head, lse_seq, lse_token, lse_head, SIDE, LSE)
            piece += 1


@gluon_jit(do_not_specialize=(
    "batch", "columns", "table_row", "tiles", "lanes", "rows", "heads", "q_len", "lse_seq", "lse_token", "lse_head"))
def _decode(
    q, q_rope, kv, kv_rope, out, lse, part, notes, shares, table, lens, factor, batch, columns, table_row, tiles,
    lanes, rows, heads, q_len, out_seq, out_token, out_head, lse_seq, lse_token, lse_head,
    PAGE: gl.constexpr, BLOCK_B: gl.constexpr, LEAST: gl.constexpr, EXTRA: gl.constexpr, LSE: gl.constexpr,
):
    """One program per multiprocessor: share out the blocks, then load with one warp and attend with two warpgroups.

    A request's rows make ``tiles * lanes`` tiles. Each lane of programs shares out the same ``tiles`` in the same way:
    programs side by side read the same keys at the same time, all but one from the cache.
    """
    _let_join_start()
    blocks = _lengths(lens, batch, columns, PAGE, BLOCK_B)  # under way while the barriers are made
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(q.dtype, [2, 64, 256], FLAT)
    q_rope_s = gl.allocate_shared_memory(q.dtype, [1, 64, 64], FLAT)
    kv_s = gl.allocate_shared_memory(kv.dtype, [4, 64, 256], FLAT)
    rope_s = gl.allocate_shared_memory(kv.dtype, [2, 64, 64], FLAT)
    top_s = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    sum_s = gl.allocate_shared_memory(gl.float32, [4, 64], LINE)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    done = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    q_bar = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(4):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(done.index(i), count=1)
        hopper.mbarrier.init(q_bar.index(i), count=1 + i)
    hopper.fence_async_shared()
    chunked, size, ends = _share(blocks, batch, shares, tiles, gl.num_programs(0) // lanes, BLOCK_B, LEAST, EXTRA)
    item0, lo0, item1, hi1 = _work(
        gl.program_id(0) // lanes, ends, gl.max(ends, 0), lens, columns, tiles, chunked, size, PAGE)
    gl.warp_specialize(
        [
            (_consume, (
                q_s, q_rope_s, kv_s, rope_s, top_s, sum_s, full, empty, ready, q_bar, done, lens, out, lse, part,
                notes, columns, tiles, lanes, rows, heads, q_len, factor, out_seq, out_token, out_head, lse_seq,
                lse_token, lse_head, item0, lo0, item1, hi1, gl.constexpr(0), PAGE, LSE)),
            (_consume, (
                q_s, q_rope_s, kv_s, rope_s, top_s, sum_s, full, empty, ready, q_bar, done, lens, out, lse, part,
                notes, columns, tiles, lanes, rows, heads, q_len, factor, out_seq, out_token, out_head, lse_seq,
                lse_token, lse_head, item0, lo0, item1, hi1, gl.constexpr(1), PAGE, LSE)),
            (_produce, (
                q, q_rope, kv, kv_rope, q_s, q_rope_s, kv_s, rope_s, full, empty, q_bar, lens, table, table_row,
                columns, tiles, lanes, rows, item0, lo0, item1, hi1, PAGE)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon_jit
def _parts_of(seq, tile, n, shares, lanes):
    """Return a tile's parts, the program of the first, and whether that one keeps it as its second piece.

    The parts are in programs of one lane, ``lanes`` apart.

    An empty request has no part, a tile that was not cut one.
    """
    start, size = gl.load(shares + 1 + seq), gl.load(shares)
    chunked, size = size < 0, gl.maximum(size, -size)
    cuts = gl.where(chunked, _ceil(n, size), n)
    at = start + tile // lanes * cuts
    parts = gl.where(chunked, cuts, (at + n - 1) // size - at // size + 1)
    program = gl.where(chunked, at, at // size)
    second = gl.where(chunked, 0, (at % size != 0).to(gl.int32))
    return gl.where(n == 0, 0, parts), program * lanes + tile % lanes, second


@gluon_jit
def _join_rows(
    part, notes, parts, program, lanes, second, row, column, rows, size, T: gl.constexpr, HEIGHT: gl.constexpr,
    PARTS: gl.constexpr, AT_ONCE: gl.constexpr,
):
    """Return 256 columns of AT_ONCE rows of the result, and log2 of their sums."""
    N: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, T))
    A: gl.constexpr = gl.SliceLayout(0, T)
    acc = gl.zeros([AT_ONCE, 256], gl.float32, A)
    top, total = gl.full([AT_ONCE], float("-inf"), gl.float32, N), gl.zeros([AT_ONCE], gl.float32, N)
    for k in range(0, parts, PARTS):
        some = k + gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, T)))
        slot = 2 * (program + some * lanes) + gl.where(some == 0, second, 0)
        at = (slot * HEIGHT)[:, None] + (row % HEIGHT)[None, :]
        there = (some < parts)[:, None] & (row < rows)[None, :]
        own = part + (at.to(gl.int64) * 512)[:, :, None] + column[None, None, :]
        x = gl.load(own, mask=there[:, :, None], other=0.0)
        sums = gl.load(notes + at, mask=there, other=float("-inf"))
        factor = gl.load(notes + (1 + gl.program_id(2)) * size + at, mask=there, other=0.0)
        _keep_loads_above()
        new = gl.maximum(top, gl.max(sums, 0))
        base = gl.where(new == float("-inf"), 0.0, new)
        old, weight = gl.exp2(top - base), gl.exp2(sums - base[None, :])
        top, total = new, total * old + gl.sum(weight, 0)
        old = gl.convert_layout(old, gl.SliceLayout(1, A))
        acc = acc * old[:, None] + gl.sum(x.to(gl.float32) * (weight * factor)[:, :, None], 0)
    log2_sum = gl.where(total == 0.0, float("-inf"), top + gl.log2(total))
    inverse = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, A))
    return acc * inverse[:, None], log2_sum


@gluon_jit(do_not_specialize=("columns", "lanes", "slots", "rows", "heads", "lse_seq", "lse_token", "lse_head"))
def _join(
    part, notes, shares, out, lse, lens, columns, lanes, slots, rows, heads, out_seq, out_token, out_head, lse_seq,
    lse_token, lse_head,
    HEIGHT: gl.constexpr, PAGE: gl.constexpr, LSE: gl.constexpr, TAKE: gl.constexpr, PARTS: gl.constexpr,
    SPREAD: gl.constexpr,
):
    """Join the parts of TAKE rows of a request; rows that were not cut are complete, those of an empty one are 0.

    A warp takes 256 columns of a row, eight per thread, and SPREAD warps share the parts of one. All loads of PARTS
    parts are under way together. The third axis of the grid is the half of the columns.
    """
    T: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [SPREAD, 4 // SPREAD, 1], [2, 1, 0])
    seq, row0 = gl.program_id(1), gl.program_id(0) * TAKE
    n = _blocks(gl.load(lens + seq), columns, PAGE)
    _wait_for_parts()
    parts, program, second = _parts_of(seq, row0 // HEIGHT, n, shares, lanes)
    if parts != 1:
        A: gl.constexpr = gl.SliceLayout(0, T)
        N: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, T))
        column = gl.program_id(2) * 256 + gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, T)))
        out += seq.to(gl.int64) * out_seq
        for some in range(row0, gl.minimum(row0 + TAKE, rows), 4 // SPREAD):
            row = some + gl.arange(0, 4 // SPREAD, N)
            value, log2_sum = _join_rows(
                part, notes, parts, program, lanes, second, row, column, rows, slots * (2 * HEIGHT), T, HEIGHT, PARTS,
                4 // SPREAD)
            if LSE and gl.program_id(2) == 0:
                at = lse + seq.to(gl.int64) * lse_seq + (row // heads).to(gl.int64) * lse_token + row % heads * lse_head
                gl.store(at, log2_sum * 0.6931471805599453, mask=row < rows)
            row = some + gl.arange(0, 4 // SPREAD, gl.SliceLayout(1, A))
            to = out + (row // heads).to(gl.int64) * out_token + row % heads * out_head
            to = to[:, None] + (gl.program_id(2) * 256 + gl.arange(0, 256, gl.SliceLayout(0, A)))[None, :]
            gl.store(to, value.to(out.dtype.element_ty), mask=(row < rows)[:, None])
# fmt: on

# Launching a program puts Triton's own object in the place of its name; here the declarations stay.
DECLARED: Final = {
    "decode": _decode,
    "join": _join,
    "lengths": _lengths,
    "let_join_start": _let_join_start,
    "load": _load,
    "pages": _pages,
    "piece": _piece,
    "share": _share,
    "work": _work,
    "zero": _zero,
}
