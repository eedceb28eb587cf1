# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
"""Rotary embedding in Triton: a block of heads of one token per program; keys and values go to the cache on the way.

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from tskernel.backends.lazy_triton import is_traced, jit
from tskernel.backends.portable import _cache_triton as paged
from tskernel.backends.portable import _rows as host
from tskernel.backends.portable._cache_triton import _cached, _slot_of, _store_heads
from tskernel.backends.portable._numbers_triton import _columns
from tskernel.ops.embedding._rope import as_heads

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _angles(positions, table, token, tokens, p_step, rows, t_row, HALF: tl.constexpr, PADDED: tl.constexpr):
    """Return cosines and sines of a token's position, and whether the table has them."""
    position = tl.load(positions + token * p_step, mask=token < tokens, other=-1).to(tl.int64)
    known = (position >= 0) & (position < rows)
    lane = tl.arange(0, PADDED)
    at = table + tl.where(known, position, 0) * t_row + lane
    cos = tl.load(at, mask=(lane < HALF) & known, other=1.0).to(tl.float32)
    sin = tl.load(at + HALF, mask=(lane < HALF) & known, other=0.0).to(tl.float32)
    return cos[None, :], sin[None, :], known


@jit
def _rotate(
    x, out, cache, scale, head, heads, exists, cos, sin, known, x_head, x_column, o_head, o_column, c_head, c_column,
    s_step, HALF: tl.constexpr, PADDED: tl.constexpr, NEOX: tl.constexpr, X_UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    C_UNIT: tl.constexpr, CACHE: tl.constexpr, SCALED: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):
    """Rotate the leading channels of heads; with CACHE the results, rounded, go to the slot at ``cache`` too."""
    lane = tl.arange(0, PADDED)
    there = (head < heads)[:, None]
    from_x = x + (head.to(tl.int64) * x_head)[:, None]
    to = out + (head.to(tl.int64) * o_head)[:, None]
    if NEOX:
        inside = there & (lane < HALF)[None, :]
        a = tl.load(from_x + _columns(lane, x_column, X_UNIT)[None, :], mask=inside, other=0.0)
        b = tl.load(from_x + _columns(lane + HALF, x_column, X_UNIT)[None, :], mask=inside, other=0.0)
    else:
        pair = tl.arange(0, 2 * PADDED)
        inside = there & (pair < 2 * HALF)[None, :]
        both = tl.load(from_x + _columns(pair, x_column, X_UNIT)[None, :], mask=inside, other=0.0)
        a, b = tl.split(tl.reshape(both, [both.shape[0], PADDED, 2]))
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    new_a = tl.where(known, (wide_a * cos - wide_b * sin).to(a.dtype), a)
    new_b = tl.where(known, (wide_b * cos + wide_a * sin).to(a.dtype), b)
    if NEOX:
        tl.store(to + _columns(lane, o_column, O_UNIT)[None, :], new_a, mask=inside)
        tl.store(to + _columns(lane + HALF, o_column, O_UNIT)[None, :], new_b, mask=inside)
        if CACHE:
            kept = cache + (head.to(tl.int64) * c_head)[:, None]
            new_a = _cached(new_a, scale, head, heads, s_step, cache.dtype.element_ty, SCALED, FORMAT, NATIVE)
            new_b = _cached(new_b, scale, head, heads, s_step, cache.dtype.element_ty, SCALED, FORMAT, NATIVE)
            tl.store(kept + _columns(lane, c_column, C_UNIT)[None, :], new_a, mask=inside & exists)
            tl.store(kept + _columns(lane + HALF, c_column, C_UNIT)[None, :], new_b, mask=inside & exists)
    else:
        y = tl.reshape(tl.join(new_a, new_b), [a.shape[0], 2 * PADDED])
        tl.store(to + _columns(pair, o_column, O_UNIT)[None, :], y, mask=inside)
        if CACHE:
            kept = cache + (head.to(tl.int64) * c_head)[:, None]
            y = _cached(y, scale, head, heads, s_step, cache.dtype.element_ty, SCALED, FORMAT, NATIVE)
            tl.store(kept + _columns(pair, c_column, C_UNIT)[None, :], y, mask=inside & exists)


@jit
def _copy_tail(
    x, out, cache, scale, head, heads, exists, x_head, x_column, o_head, o_column, c_head, c_column, s_step,
    FROM: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, X_UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    C_UNIT: tl.constexpr, COPY: tl.constexpr, CACHE: tl.constexpr, SCALED: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Copy the channels behind the rotated ones, to where they are wanted."""
    column = FROM + tl.arange(0, PADDED)
    inside = (head < heads)[:, None] & (column < DIM)[None, :]
    y = tl.load(x + (head.to(tl.int64) * x_head)[:, None] + _columns(column, x_column, X_UNIT)[None, :], mask=inside,
                other=0.0)
    if COPY:
        to = out + (head.to(tl.int64) * o_head)[:, None] + _columns(column, o_column, O_UNIT)[None, :]
        tl.store(to, y, mask=inside)
    if CACHE:
        to = cache + (head.to(tl.int64) * c_head)[:, None] + _columns(column, c_column, C_UNIT)[None, :]
        y = _cached(y, scale, head, heads, s_step, cache.dtype.element_ty, SCALED, FORMAT, NATIVE)
        tl.store(to, y, mask=inside & exists)


@jit
def _turn(
    x, out, cache, scale, head, heads, exists, positions, table, token, tokens, p_step, rows, t_row,
    x_head, x_column, o_head, o_column, c_head, c_column, s_step,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr, NEOX: tl.constexpr,
    X_UNIT: tl.constexpr, O_UNIT: tl.constexpr, C_UNIT: tl.constexpr, COPY: tl.constexpr, CACHE: tl.constexpr,
    SCALED: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):
    """Rotate heads of one token, and copy the rest of them."""
    if HALF > 0:
        cos, sin, known = _angles(positions, table, token, tokens, p_step, rows, t_row, HALF, HALF_PADDED)
        _rotate(
            x, out, cache, scale, head, heads, exists, cos, sin, known, x_head, x_column, o_head, o_column, c_head,
            c_column, s_step, HALF, HALF_PADDED, NEOX, X_UNIT, O_UNIT, C_UNIT, CACHE, SCALED, FORMAT, NATIVE)
    if TAIL > 0:
        _copy_tail(
            x, out, cache, scale, head, heads, exists, x_head, x_column, o_head, o_column, c_head, c_column, s_step,
            2 * HALF, DIM, TAIL, X_UNIT, O_UNIT, C_UNIT, COPY, CACHE, SCALED, FORMAT, NATIVE)


@jit(do_not_specialize=("tokens", "rows"))
def _rope(
    q, k, positions, table, q_out, k_out, tokens, q_heads, k_heads, rows, p_step, t_row,
    q_token, q_head, q_column, k_token, k_head, k_column, qo_token, qo_head, qo_column, ko_token, ko_head, ko_column,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr, NEOX: tl.constexpr,
    BLOCK: tl.constexpr, Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr, Q_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
    QO_UNIT: tl.constexpr, KO_UNIT: tl.constexpr, COPY: tl.constexpr,
):
    """Rotate a block of heads of the queries, or of the keys, of one token."""
    block = tl.program_id(0) % (Q_BLOCKS + K_BLOCKS)
    token = (tl.program_id(0) // (Q_BLOCKS + K_BLOCKS)).to(tl.int64)
    q_heads, k_heads = tl.where(token < tokens, q_heads, 0), tl.where(token < tokens, k_heads, 0)
    if block < Q_BLOCKS:
        head = block * BLOCK + tl.arange(0, BLOCK)
        _turn(
            q + token * q_token, q_out + token * qo_token, q, q, head, q_heads, True, positions, table, token, tokens,
            p_step, rows, t_row, q_head, q_column, qo_head, qo_column, 0, 0, 0,
            HALF, HALF_PADDED, DIM, TAIL, NEOX, Q_UNIT, QO_UNIT, True, COPY, False, False, "float", False)
    else:
        head = (block - Q_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        _turn(
            k + token * k_token, k_out + token * ko_token, k, k, head, k_heads, True, positions, table, token, tokens,
            p_step, rows, t_row, k_head, k_column, ko_head, ko_column, 0, 0, 0,
            HALF, HALF_PADDED, DIM, TAIL, NEOX, K_UNIT, KO_UNIT, True, COPY, False, False, "float", False)


@jit(do_not_specialize=("tokens", "rows", "page", "count"))
def _rope_store(
    q, k, v, positions, table, k_cache, v_cache, slots, k_scale, v_scale,
    tokens, q_heads, k_heads, rows, page, count, p_step, t_row, slot_step, q_token, q_head, q_column,
    k_token, k_head, k_column, v_token, v_head, v_column, kc_page, kc_slot, kc_head, kc_column,
    vc_page, vc_slot, vc_head, vc_column, ks_step, vs_step,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr, NEOX: tl.constexpr,
    BLOCK: tl.constexpr, Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    V_BLOCK: tl.constexpr, V_BLOCKS: tl.constexpr, Q_UNIT: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr,
    KC_UNIT: tl.constexpr, VC_UNIT: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):
    """Rotate a block of heads of one token in place, keys into the cache too; or copy one of its values there."""
    block = tl.program_id(0) % (Q_BLOCKS + K_BLOCKS + V_BLOCKS)
    token = (tl.program_id(0) // (Q_BLOCKS + K_BLOCKS + V_BLOCKS)).to(tl.int64)
    q_heads, k_heads = tl.where(token < tokens, q_heads, 0), tl.where(token < tokens, k_heads, 0)
    if block < Q_BLOCKS:
        of_q = q + token * q_token
        if HALF > 0:
            _turn(
                of_q, of_q, q, q, block * BLOCK + tl.arange(0, BLOCK), q_heads, True, positions, table, token, tokens,
                p_step, rows, t_row, q_head, q_column, q_head, q_column, 0, 0, 0,
                HALF, HALF_PADDED, DIM, 0, NEOX, Q_UNIT, Q_UNIT, True, False, False, False, "float", False)
    elif block < Q_BLOCKS + K_BLOCKS:
        of_k = k + token * k_token
        at_page, at_slot, exists = _slot_of(slots, token, tokens, slot_step, page, count)
        _turn(
            of_k, of_k, k_cache + at_page * kc_page + at_slot * kc_slot, k_scale,
            (block - Q_BLOCKS) * BLOCK + tl.arange(0, BLOCK), k_heads, exists, positions, table, token, tokens,
            p_step, rows, t_row, k_head, k_column, k_head, k_column, kc_head, kc_column, ks_step,
            HALF, HALF_PADDED, DIM, TAIL, NEOX, K_UNIT, K_UNIT, KC_UNIT, False, True, K_SCALED, FORMAT, NATIVE)
    else:
        at_page, at_slot, exists = _slot_of(slots, token, tokens, slot_step, page, count)
        _store_heads(
            v + token * v_token, v_cache + at_page * vc_page + at_slot * vc_slot, v_scale,
            (block - Q_BLOCKS - K_BLOCKS) * V_BLOCK + tl.arange(0, V_BLOCK), k_heads, exists,
            v_head, v_column, vc_head, vc_column, vs_step, V_DIM, V_PADDED, V_UNIT, VC_UNIT, V_SCALED, FORMAT, NATIVE)
# fmt: on


_plans: Final = host.Steps()
_plans_store: Final = host.Steps()


def rope(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    table: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    is_neox: bool,
    head_size: int | None,
) -> None:
    """Write ``q`` and ``k``, leading channels rotated, to ``q_out`` and ``k_out``, which may be they themselves."""
    copy = q_out is not q
    q, k = as_heads(q, head_size), as_heads(k, head_size)
    q_out, k_out = (as_heads(q_out, head_size), as_heads(k_out, head_size)) if copy else (q, k)
    tensors = (q, k, positions, host.flash.unit(table), q_out, k_out)
    host.run(_plans, _work, tensors, is_neox, copy)


def _blocks(heads: Any, block: int) -> int:
    return -(-int(heads) // block)


def _sizes(dim: int, rotary: int, is_neox: bool) -> dict[str, Any]:
    """Return the constants that say how a head is cut, and how many heads a program has: about 1024 channels."""
    half, tail = rotary // 2, dim - rotary
    return {
        "HALF": half, "HALF_PADDED": host.pow2(max(half, 1)), "DIM": dim, "TAIL": host.pow2(tail) if tail else 0,
        "NEOX": is_neox, "BLOCK": max(1, 1024 // host.pow2(dim)),
    }  # fmt: skip


def _work(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, q_out: Tensor, k_out: Tensor, is_neox: bool, copy: bool
) -> list[host.Program]:
    dim, rotary = int(q.shape[2]), int(table.shape[1])
    sizes = _sizes(dim, rotary, is_neox)
    most = max(int(q.shape[1]), int(k.shape[1]), 1)
    sizes["BLOCK"] = min(sizes["BLOCK"], host.pow2(most))
    q_blocks, k_blocks = _blocks(q.shape[1], sizes["BLOCK"]), _blocks(k.shape[1], sizes["BLOCK"])
    if q_blocks + k_blocks == 0 or not (rotary or copy):
        return []
    strides = (*q.stride(), *k.stride(), *q_out.stride(), *k_out.stride())
    numbers = (q.shape[0], q.shape[1], k.shape[1], table.shape[0], positions.stride(0), table.stride(0), *strides)
    constants = {
        **sizes, "TAIL": sizes["TAIL"] if copy else 0, "Q_BLOCKS": q_blocks, "K_BLOCKS": k_blocks, "COPY": copy,
        **paged.units(Q_UNIT=q, K_UNIT=k, QO_UNIT=q_out, KO_UNIT=k_out),
        "num_warps": host.warps(sizes["BLOCK"] * host.pow2(dim), 8),
    }  # fmt: skip
    grid = (torch.sym_max(1, q.shape[0]) * (q_blocks + k_blocks),)
    return [host.Program(_rope, grid, (q, k, positions, table, q_out, k_out, *numbers), constants)]


def rope_store(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    is_neox: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Rotate ``q`` and ``k`` in place and store ``k`` and ``v``, in one launch."""
    form, native = paged.cache_format(k, k_cache)
    size = k_cache.shape[3]
    tensors = (
        as_heads(q, size), as_heads(k, size), as_heads(v, v_cache.shape[3]), positions, host.flash.unit(table),
        paged.plain(k_cache), paged.plain(v_cache), slots, k_scale, v_scale,
    )  # fmt: skip
    host.run(_plans_store, _work_store, tensors, is_neox, form, native)


def _work_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    is_neox: bool,
    form: str,
    native: bool,
) -> list[host.Program]:
    dim, rotary = int(q.shape[2]), int(table.shape[1])
    sizes, of_v = _sizes(dim, rotary, is_neox), paged.heads_of(k.shape[1], int(v.shape[2]))
    sizes["BLOCK"] = min(sizes["BLOCK"], host.pow2(max(int(q.shape[1]), int(k.shape[1]), 1)))
    q_blocks = _blocks(q.shape[1], sizes["BLOCK"]) if rotary else 0
    k_blocks = _blocks(k.shape[1], sizes["BLOCK"])
    each = q_blocks + k_blocks + of_v.blocks
    if each == 0 or (not is_traced(q) and q.shape[0] == 0):
        return []
    strides = (*q.stride(), *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride())
    page = k_cache.shape[1]
    numbers = (
        q.shape[0], q.shape[1], k.shape[1], table.shape[0], page, k_cache.shape[0] * page, positions.stride(0),
        table.stride(0), slots.stride(0), *strides, paged.step_of(k_scale), paged.step_of(v_scale),
    )  # fmt: skip
    constants = {
        **sizes, "Q_BLOCKS": q_blocks, "K_BLOCKS": k_blocks, "V_DIM": of_v.dim, "V_PADDED": of_v.padded,
        "V_BLOCK": of_v.block, "V_BLOCKS": of_v.blocks, "K_SCALED": k_scale is not None,
        "V_SCALED": v_scale is not None,
        **paged.units(Q_UNIT=q, K_UNIT=k, V_UNIT=v, KC_UNIT=k_cache, VC_UNIT=v_cache), "FORMAT": form, "NATIVE": native,
        "num_warps": host.warps(sizes["BLOCK"] * host.pow2(dim), 8),
    }  # fmt: skip
    tensors = (q, k, v, positions, table, k_cache, v_cache, slots, k_scale, v_scale)
    return [host.Program(_rope_store, (torch.sym_max(1, q.shape[0]) * each,), (*tensors, *numbers), constants)]


def case(chip: host.Chip, name: str, dim: int, rotary: int, *, is_neox: bool) -> Any:
    """Return what a test without a GPU compiles of ``rope``: 64 and 8 heads, in place."""
    sizes = _sizes(dim, rotary, is_neox)
    constants = {
        **sizes, "TAIL": 0, "Q_BLOCKS": _blocks(64, sizes["BLOCK"]), "K_BLOCKS": _blocks(8, sizes["BLOCK"]),
        "COPY": False,
        **dict.fromkeys(("Q_UNIT", "K_UNIT", "QO_UNIT", "KO_UNIT"), True),
    }  # fmt: skip
    types = {"q": "*bf16", "k": "*bf16", "q_out": "*bf16", "k_out": "*bf16", "positions": "*i64", "table": "*fp32"}
    types |= dict.fromkeys(("q_column", "k_column", "qo_column", "ko_column", "p_step"), "1") | {
        "rows": "i32",
        "tokens": "i32",
    }
    options = {"num_warps": host.warps(sizes["BLOCK"] * host.pow2(dim), 8, hip=chip.hip)}
    return host.compile_case(name, _rope, constants, types, options)


def store_case(chip: host.Chip, name: str, form: str, *, rotary: int) -> Any:
    """Return what a test without a GPU compiles of ``rope_store``: 64 and 8 heads of 128."""
    sizes, of_v = _sizes(128, rotary, True), paged.heads_of(8, 128)
    constants = {
        **sizes, "Q_BLOCKS": _blocks(64, sizes["BLOCK"]), "K_BLOCKS": _blocks(8, sizes["BLOCK"]), "V_DIM": of_v.dim,
        "V_PADDED": of_v.padded, "V_BLOCK": of_v.block, "V_BLOCKS": of_v.blocks, "FORMAT": form, "NATIVE": False,
        **dict.fromkeys(("Q_UNIT", "K_UNIT", "V_UNIT", "KC_UNIT", "VC_UNIT"), True), "K_SCALED": True, "V_SCALED": True,
    }  # fmt: skip
    cache = "*bf16" if form == "float" else "*u8"
    types = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "positions": "*i64", "table": "*bf16", "slots": "*i64"}
    types |= {"k_cache": cache, "v_cache": cache, "k_scale": "*fp32", "v_scale": "*fp32"}
    types |= dict.fromkeys(("rows", "page", "count", "tokens"), "i32") | {"p_step": "1", "slot_step": "1"}
    types |= dict.fromkeys(("q_column", "k_column", "v_column", "kc_column", "vc_column"), "1")
    options = {"num_warps": host.warps(sizes["BLOCK"] * 128, 8, hip=chip.hip)}
    return host.compile_case(name, _rope_store, constants, types, options)
