# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""Mixture of experts in Triton: products of the rows of one expert each, and the weighted sum of what they give.

A slot is one choice of one token. A tile holds slots of one expert: blocks that ``moe_dispatch`` made, or, where slots
are few, those that the program finds by itself among all ids. Nothing is read for experts without slots.

Source: sorted blocks of one expert: Gale et al. 2022, https://arxiv.org/abs/2211.15841.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tskernel.backends.lazy_triton import jit
from tskernel.backends.portable._gated_triton import _activate
from tskernel.backends.portable._gemm_triton import _block_scale, _in_bands, _numbers, _product, _scaled

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _local(ids, slot, exists, top_k, id_row, id_column, places, known, experts, MAPPED: tl.constexpr):
    """Return the expert of slots on this device; -1 for those that have none."""
    token, choice = slot // top_k, slot % top_k
    expert = tl.load(ids + token.to(tl.int64) * id_row + choice * id_column, mask=exists, other=-1).to(tl.int64)
    if MAPPED:
        inside = (expert >= 0) & (expert < known)
        expert = tl.load(places + tl.where(inside, expert, 0), mask=inside, other=-1).to(tl.int64)
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@jit
def _found(ids, tile, slots, top_k, id_row, id_column, places, known, experts, MAPPED: tl.constexpr,
           SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of slot ``tile``, and the next BLOCK_M slots that have it, if this one begins a block of them.

    Expert -1: nothing to do.
    """
    s = tl.arange(0, SLOTS)
    each = _local(ids, s, s < slots, top_k, id_row, id_column, places, known, experts, MAPPED)
    expert = tl.sum(tl.where(s == tile, each, 0), 0)
    same = each == expert
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    before = tl.sum((same & (s < tile)).to(tl.int32), 0)
    place = before + tl.arange(0, BLOCK_M)
    slot = tl.sum(tl.where(same[None, :] & (rank[None, :] == place[:, None]), s[None, :], 0), 1)
    expert = tl.where(before % BLOCK_M == 0, expert, -1)
    return expert, slot, place < tl.sum(same.to(tl.int32), 0)


@jit
def _sorted(order, owners, padded, tile, slots, experts, SPAN: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a block of SPAN places, its slots and which of those are; expert -1: nothing to do."""
    lane = tl.arange(0, BLOCK_M)
    place = tile * SPAN + lane
    expert, end = tl.load(owners + tile), tl.load(padded)
    exists = (lane < SPAN) & (place < end)
    slot = tl.load(order + place, mask=exists, other=slots)
    expert = tl.where((tile * SPAN < end) & (expert < experts), expert, -1)
    return expert, slot, exists & (slot >= 0) & (slot < slots)


@jit(do_not_specialize=("slots", "tiles_m"))
def _experts(
    x, w, out, x_scale, w_scale, bias, order, owners, padded, ids, places, slots, n, k, experts, tiles_m, tiles_n,
    divide, top_k, known, id_row, id_column, x_row, x_column, w_expert, w_row, w_column, x_scale_row, x_scale_column,
    w_scale_expert, w_scale_row, w_scale_column, bias_expert,
    SORTED: tl.constexpr, SPAN: tl.constexpr, SLOTS: tl.constexpr, MAPPED: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, X_HOW: tl.constexpr, HOW: tl.constexpr,
    B_KIND: tl.constexpr, TYPE: tl.constexpr, SUM: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr,
    INTO: tl.constexpr, EACH: tl.constexpr, POWER: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr,
    TAIL: tl.constexpr, BAND: tl.constexpr, X_UNIT: tl.constexpr, W_UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Write BLOCK_N rows of an expert's weight, times its slots' rows of ``x``, to ``out [slots, n]``.

    Slot s has row ``s // divide`` of ``x``. GATED: rows of the weight are taken in pairs, one of the gate and one
    ``n`` below of what it gates, and give one column. HOW and X_HOW the scales lie: "none", "row" or "group".
    """
    tile, column0 = _in_bands(tiles_m, tiles_n, BAND)
    if SORTED:
        expert, slot, used = _sorted(order, owners, padded, tile, slots, experts, SPAN, BLOCK_M)
    else:
        expert, slot, used = _found(ids, tile, slots, top_k, id_row, id_column, places, known, experts, MAPPED, SLOTS,
                                    BLOCK_M)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    slot = tl.where(used, slot, 0).to(tl.int64)
    row = slot // divide
    lane = column0.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        half = tl.minimum(lane // 2, n - 1)
        tall = half + lane % 2 * n
    else:
        tall = tl.minimum(lane, n - 1)
    w, w_scale_at = w + expert * w_expert, w_scale
    if HOW != "none":
        w_scale_at = w_scale + expert * w_scale_expert
    groups, scale_row = (k + GROUP - 1) // GROUP, tall // TALL
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.int32 if SUM == "i32" else tl.float32)
    for k0 in range(0, k, BLOCK_K):
        a = _numbers(x, row, k0, k, x_row, x_column, "plain", TYPE, BLOCK_K, X_UNIT, TAIL)
        b = _numbers(w, tall, k0, k, w_row, w_column, B_KIND, TYPE, BLOCK_K, W_UNIT, TAIL)
        if HOW == "group" and INTO:
            b = _scaled(b, w_scale_at, scale_row, k0, groups, w_scale_row, w_scale_column, TYPE, GROUP, EACH, POWER,
                        TAIL)
        if HOW == "group" and not INTO:
            s = _block_scale(x_scale, w_scale_at, row, scale_row, k0 // GROUP, groups, x_scale_row, x_scale_column,
                             w_scale_row, w_scale_column, X_HOW == "group", POWER, SWAP)
            acc += _product(a, b, acc, SWAP, False) * s
        else:
            acc = _product(a, b, acc, SWAP, True)
    y = (tl.trans(acc) if SWAP else acc).to(tl.float32)
    if X_HOW == "row":
        y = y * tl.load(x_scale + row * x_scale_row)[:, None]
    if HOW == "row":
        y = y * tl.load(w_scale_at + tall * w_scale_row)[None, :]
    if BIAS:
        y = y + tl.load(bias + expert * bias_expert + tall).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(y, [BLOCK_M, BLOCK_N // 2, 2]))
        y = _activate(gate, up, KIND, ALPHA, LIMIT)
        column = column0.to(tl.int64) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        column = lane
    tl.store(out + slot[:, None] * n + column[None, :], y.to(out.dtype.element_ty),
             mask=used[:, None] & (column < n)[None, :])


@jit(do_not_specialize=("tokens",))
def _combine(
    y, weights, ids, places, out, tokens, width, top_k, known, experts, y_token, y_choice, y_column, weight_row,
    weight_column, id_row, id_column, out_row, out_column,
    USED: tl.constexpr, MAPPED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write the weighted sum of one token's choices, in their order.

    USED: "all", ids that are not "negative", or that are "local"; what is not used is not read.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width) & (token < tokens)
    acc = tl.zeros([BLOCK], tl.float32)
    y = y + token * y_token
    for choice in range(0, top_k):
        used = token < tokens
        if USED == "negative":
            used = used & (tl.load(ids + token * id_row + choice * id_column, mask=used, other=-1) >= 0)
        elif USED == "local":
            slot = token * top_k + choice
            used = _local(ids, slot, used, top_k, id_row, id_column, places, known, experts, MAPPED) >= 0
        weight = tl.load(weights + token * weight_row + choice * weight_column, mask=used, other=0.0).to(tl.float32)
        at = y + (column if UNIT else column.to(tl.int64) * y_column)
        value = tl.load(at, mask=inside & used, other=0.0).to(tl.float32)
        acc += tl.where(used, value * weight, 0.0)
        y += y_choice
    to = out + token * out_row + (column if UNIT else column.to(tl.int64) * out_column)
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)
# fmt: on
