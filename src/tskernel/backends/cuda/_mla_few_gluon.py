# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
"""Absorbed latent attention on Hopper for few query rows per request, in Gluon: bound by memory, not by products.

With 16 heads a tile of 64 rows is mostly padding, which takes time and shared memory. Here the operands are swapped:
the scores are ``S^T = K Q^T`` with the 64 keys of a block where an instruction wants its 64 rows, and the result is
``O^T = V^T P^T`` with 64 columns of the values there; the 16 or 32 query rows are the narrow side. V^T is read from
where K lies, as the transposed operand. All 512 columns of so few rows fit in the registers of one warpgroup.

What shared memory is left is a ring of GROUPS pieces of 64 keys by 192 columns, three of which make a block: a piece
is loaded again as soon as its block is done, and scores start with the first one that has arrived.

How blocks are shared out and parts joined, and what a tensor map describes, is as in ``_mla_gluon``; the sources, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tskernel.backends.cuda import _mla_gluon as wide
from tskernel.backends.lazy_triton import gluon_jit

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

# The compiler looks names up in this file. `join` is resolved there, and not declared here.
_let_join_start, _lengths, _load = (wide.DECLARED[name] for name in ("let_join_start", "lengths", "load"))
_pages, _piece, _share = (wide.DECLARED[name] for name in ("pages", "piece", "share"))
_work, _zero = wide.DECLARED["work"], wide.DECLARED["zero"]


# fmt: off
@gluon_jit
def _produce_few(
    q, kv, q_s, kv_s, full, empty, q_bar, lens, table, table_row, columns, tiles, rows, item0, lo0, item1, hi1,
    PAGE: gl.constexpr, HEIGHT: gl.constexpr, GROUPS: gl.constexpr,
):
    """Load queries and keys, each as soon as its place is free."""
    piece, group = 0, 0
    for item in range(item0, item1 + 1):
        seq, tile, keys, _all, lo, hi = _piece(item, item0, lo0, item1, hi1, lens, columns, tiles, PAGE)
        if hi > lo:
            count = (keys + PAGE - 1) // PAGE
            own = table + seq.to(gl.int64) * table_row
            next0, next1, next2, next3 = _pages(own, lo, count, PAGE)
            hopper.mbarrier.wait(q_bar.index(1), (piece & 1) ^ 1)
            hopper.mbarrier.expect(q_bar.index(0), HEIGHT * 576 * 2)
            for c in gl.static_range(9):
                hopper.tma.async_copy_global_to_shared(
                    q, [seq * rows + tile * HEIGHT, 64 * c], q_bar.index(0), q_s.index(c))
            for n in range(lo, hi):
                page0, page1, page2, page3 = next0, next1, next2, next3
                # Under way while this block waits for its place.
                next0, next1, next2, next3 = _pages(own, gl.minimum(n + 1, hi - 1), count, PAGE)
                for third in gl.static_range(3):
                    slot = (group + third) % GROUPS
                    bar = full.index(slot)
                    hopper.mbarrier.wait(empty.index(slot), (((group + third) // GROUPS) & 1) ^ 1)
                    hopper.mbarrier.expect(bar, 64 * 192 * 2)
                    for c in gl.static_range(3):
                        _load(kv, page0, page1, page2, page3, n, kv_s.index(3 * slot + c), bar, 192 * third + 64 * c,
                              64, PAGE)
                group += 3
            piece += 1


@gluon_jit
def _clear_few(kv_s, group, count, GROUPS: gl.constexpr):
    """Zero the values behind the last key: unused slots may hold NaN, and a weight of 0 would not remove it."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inside = (gl.arange(0, 64, gl.SliceLayout(1, ROWS)) < count)[:, None]
    for c in gl.static_range(8):
        box = kv_s.index(3 * ((group + c // 3) % GROUPS) + c % 3)
        x = box.load(ROWS)
        box.store(gl.where(inside, x, gl.zeros_like(x)))
    hopper.fence_async_shared()


@gluon_jit
def _add(kv_s, group, p_s, acc, shrink, C: gl.constexpr, GROUPS: gl.constexpr):
    """Add the weighted values of 64 columns."""
    v = kv_s.index(3 * ((group + C // 3) % GROUPS) + C % 3).permute((1, 0))
    return hopper.warpgroup_mma(v, p_s, acc * shrink[None, :], is_async=True)


@gluon_jit
def _scores(q_s, kv_s, full, group, zero, HEIGHT: gl.constexpr, GROUPS: gl.constexpr):
    """Return the products of a block's keys and the queries, ``[keys, rows]``."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 16])
    s = gl.zeros([64, HEIGHT], gl.float32, S)
    for third in gl.static_range(3):
        slot = (group + third) % GROUPS
        hopper.mbarrier.wait(full.index(slot), ((group + third) // GROUPS) & 1)
        for c in gl.static_range(3):
            s = hopper.warpgroup_mma(
                kv_s.index(3 * slot + c), q_s.index(3 * third + c + zero).permute((1, 0)), s, use_acc=third + c > 0,
                is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=(s,))


@gluon_jit
def _most(a, b, c, d):
    """Return each row's largest magnitude in 256 columns."""
    return gl.max(gl.maximum(gl.maximum(gl.abs(a), gl.abs(b)), gl.maximum(gl.abs(c), gl.abs(d))), 0)


@gluon_jit
def _note_part(notes, row, rows, log2_sum, factors, HEIGHT: gl.constexpr):
    """Leave for the join a part's log sums and the factors of its rows, whose largest value is written as 2^15.

    The wide program has a factor for each half of the columns; here both are the same.
    """
    size = gl.num_programs(0) * (2 * HEIGHT)
    gl.store(notes + row, log2_sum, mask=row < rows)
    gl.store(notes + size + row, factors, mask=row < rows)
    gl.store(notes + 2 * size + row, factors, mask=row < rows)


@gluon_jit
def _store_few(
    acc, C: gl.constexpr, inverse, multiple, out, part, seq, tile, whole, slot, rows, heads, out_seq, out_token,
    out_head, HEIGHT: gl.constexpr,
):
    """Write 64 columns of a tile's rows, or of a part of them, in fp16 as a multiple of each row's factor."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 16])
    row = tile * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(0, S))
    column = 64 * C + gl.arange(0, 64, gl.SliceLayout(1, S))
    mask = (row < rows)[None, :]
    if whole:
        to = out + seq.to(gl.int64) * out_seq + (row // heads).to(gl.int64) * out_token + row % heads * out_head
        gl.store(to[None, :] + column[:, None], (acc * inverse[None, :]).to(out.dtype.element_ty), mask=mask)
    else:
        own = part + ((slot - tile) * HEIGHT + row) * 512
        gl.store(own[None, :] + column[:, None], (acc * multiple[None, :]).to(gl.float16), mask=mask)


@gluon_jit
def _consume_few(
    q_s, kv_s, p_s, full, empty, q_bar, lens, out, lse, part, notes, columns, tiles, rows, heads, q_len, factor,
    out_seq, out_token, out_head, lse_seq, lse_token, lse_head, item0, lo0, item1, hi1,
    PAGE: gl.constexpr, LSE: gl.constexpr, HEIGHT: gl.constexpr, GROUPS: gl.constexpr,
):
    """Attend with one warpgroup: scores, weights, all 512 columns of the result."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 16])
    R: gl.constexpr = gl.SliceLayout(0, S)
    piece, group = 0, 0
    for item in range(item0, item1 + 1):
        seq, tile, keys, blocks, lo, hi = _piece(item, item0, lo0, item1, hi1, lens, columns, tiles, PAGE)
        if hi > lo:
            hopper.mbarrier.wait(q_bar.index(0), piece & 1)
            row = tile * HEIGHT + gl.arange(0, HEIGHT, R)
            sees = keys - (q_len - 1) + row // heads
            a0 = gl.zeros([64, HEIGHT], gl.float32, S)
            a1, a2, a3, a4, a5, a6, a7, sums = a0, a0, a0, a0, a0, a0, a0, a0
            top = gl.full([HEIGHT], float("-inf"), gl.float32, R)
            for n in range(lo, hi):
                s = _scores(q_s, kv_s, full, group, _zero(n), HEIGHT, GROUPS) * factor
                if n * 64 + 64 > keys - q_len + 1:
                    key = n * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
                    s = gl.where(key[:, None] < sees[None, :], s, float("-inf"))
                new = gl.maximum(top, gl.max(s, 0))
                base = gl.where(new == float("-inf"), 0.0, new)
                shrink, p = gl.exp2(top - base), gl.exp2(s - base[None, :])
                top, sums = new, sums * shrink[None, :] + p  # added over the keys at the end
                p_s.store(p.to(kv_s.dtype))
                hopper.fence_async_shared()
                if n * 64 + 64 > keys:
                    _clear_few(kv_s, group, keys - n * 64, GROUPS)
                a0 = _add(kv_s, group, p_s, a0, shrink, 0, GROUPS)
                a1 = _add(kv_s, group, p_s, a1, shrink, 1, GROUPS)
                a2 = _add(kv_s, group, p_s, a2, shrink, 2, GROUPS)
                a3 = _add(kv_s, group, p_s, a3, shrink, 3, GROUPS)
                a4 = _add(kv_s, group, p_s, a4, shrink, 4, GROUPS)
                a5 = _add(kv_s, group, p_s, a5, shrink, 5, GROUPS)
                a6 = _add(kv_s, group, p_s, a6, shrink, 6, GROUPS)
                a7 = _add(kv_s, group, p_s, a7, shrink, 7, GROUPS)
                a0, a1, a2, a3, a4, a5, a6, a7 = hopper.warpgroup_mma_wait(0, deps=(a0, a1, a2, a3, a4, a5, a6, a7))
                for third in gl.static_range(3):
                    hopper.mbarrier.arrive(empty.index((group + third) % GROUPS), count=1)
                group += 3
            hopper.mbarrier.arrive(q_bar.index(1), count=1)
            total = gl.sum(sums, 0)
            inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
            log2_sum = gl.where(total == 0.0, float("-inf"), top + gl.log2(total))
            whole = (lo == 0) & (hi == blocks)
            slot = 2 * gl.program_id(0) + (item != item0).to(gl.int32)
            multiple = inverse
            if not whole:
                most = gl.maximum(gl.maximum(_most(a0, a1, a2, a3), _most(a4, a5, a6, a7)), 1e-30)
                multiple = 32768.0 / most
                _note_part(notes + (slot - tile) * HEIGHT, row, rows, log2_sum, most * inverse * 2.0**-15, HEIGHT)
            elif LSE:
                at = lse + seq.to(gl.int64) * lse_seq + (row // heads).to(gl.int64) * lse_token + row % heads * lse_head
                gl.store(at, log2_sum * 0.6931471805599453, mask=row < rows)
            for c in gl.static_range(8):
                _store_few((a0, a1, a2, a3, a4, a5, a6, a7)[c], c, inverse, multiple, out, part, seq, tile, whole, slot,
                           rows, heads, out_seq, out_token, out_head, HEIGHT)
            piece += 1


@gluon_jit(do_not_specialize=(
    "batch", "columns", "table_row", "tiles", "rows", "heads", "q_len", "lse_seq", "lse_token", "lse_head"))
def _decode_few(
    q, kv, out, lse, part, notes, shares, table, lens, factor, batch, columns, table_row, tiles, rows, heads, q_len,
    out_seq, out_token, out_head, lse_seq, lse_token, lse_head,
    HEIGHT: gl.constexpr, GROUPS: gl.constexpr, PAGE: gl.constexpr, BLOCK_B: gl.constexpr, LEAST: gl.constexpr,
    EXTRA: gl.constexpr, LSE: gl.constexpr,
):
    """One program per multiprocessor: share out the blocks, then load with one warp and attend with one warpgroup."""
    _let_join_start()
    blocks = _lengths(lens, batch, columns, PAGE, BLOCK_B)  # under way while the barriers are made
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * HEIGHT, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(q.dtype, [9, HEIGHT, 64], FLAT)
    kv_s = gl.allocate_shared_memory(kv.dtype, [3 * GROUPS, 64, 64], FLAT)
    p_s = gl.allocate_shared_memory(kv.dtype, [64, HEIGHT], NARROW)
    full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BAR)
    q_bar = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(GROUPS):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        hopper.mbarrier.init(q_bar.index(i), count=1)
    hopper.fence_async_shared()
    chunked, size, ends = _share(blocks, batch, shares, tiles, gl.num_programs(0), BLOCK_B, LEAST, EXTRA)
    item0, lo0, item1, hi1 = _work(
        gl.program_id(0), ends, gl.max(ends, 0), lens, columns, tiles, chunked, size, PAGE)
    gl.warp_specialize(
        [
            (_consume_few, (
                q_s, kv_s, p_s, full, empty, q_bar, lens, out, lse, part, notes, columns, tiles, rows, heads, q_len,
                factor, out_seq, out_token, out_head, lse_seq, lse_token, lse_head, item0, lo0, item1, hi1, PAGE, LSE,
                HEIGHT, GROUPS)),
            (_produce_few, (
                q, kv, q_s, kv_s, full, empty, q_bar, lens, table, table_row, columns, tiles, rows, item0, lo0, item1,
                hi1, PAGE, HEIGHT, GROUPS)),
        ],
        [1],
        [48],
    )
# fmt: on

# Launching a program puts Triton's own object in the place of its name; here the declaration stays.
DECLARED: Final = {"decode": _decode_few}
