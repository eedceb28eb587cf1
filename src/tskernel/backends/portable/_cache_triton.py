# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
"""Writing rows into a paged cache in Triton, converted to its dtype on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.lazy_triton import is_traced, jit
from tskernel.backends.portable import _rows as host
from tskernel.backends.portable._numbers_triton import _columns, _fp8

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _cached(y, scale, head, heads, step, KIND, SCALED: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Return ``y [heads, columns]`` over its scale as the cache holds it; KIND is the dtype of its elements."""
    if SCALED:
        each = tl.load(scale + head * step, mask=head < heads, other=1.0)
        y = tl.div_rn(y.to(tl.float32), each[:, None] + tl.zeros(y.shape, tl.float32))
    if FORMAT == "float":
        y = y.to(KIND)
    else:
        y = _fp8(y.to(tl.float32), FORMAT, NATIVE)
    return y


@jit
def _slot_of(slots, token, tokens, step, page, count):
    """Return page and offset of a token's slot, and whether there is such a slot."""
    slot = tl.load(slots + token * step, mask=token < tokens, other=-1)
    exists = (slot >= 0) & (slot < count)
    slot = tl.where(exists, slot, 0)
    return slot // page, slot % page, exists


@jit
def _store_heads(
    x, cache, scale, head, heads, exists, x_head, x_column, c_head, c_column, s_step, DIM: tl.constexpr,
    PADDED: tl.constexpr, X_UNIT: tl.constexpr, C_UNIT: tl.constexpr, SCALED: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Copy heads of the token at ``x`` to the slot at ``cache``."""
    column = tl.arange(0, PADDED)
    inside = (head < heads)[:, None] & (column < DIM)[None, :] & exists
    from_x = x + (head.to(tl.int64) * x_head)[:, None] + _columns(column, x_column, X_UNIT)[None, :]
    y = tl.load(from_x, mask=inside, other=0.0)
    y = _cached(y, scale, head, heads, s_step, cache.dtype.element_ty, SCALED, FORMAT, NATIVE)
    to = cache + (head.to(tl.int64) * c_head)[:, None] + _columns(column, c_column, C_UNIT)[None, :]
    tl.store(to, y, mask=inside)


@jit(do_not_specialize=("tokens", "count", "page"))
def _store(
    k, v, k_cache, v_cache, slots, k_scale, v_scale, tokens, heads, page, count, slot_step,
    k_token, k_head, k_column, v_token, v_head, v_column, kc_page, kc_slot, kc_head, kc_column,
    vc_page, vc_slot, vc_head, vc_column, ks_step, vs_step,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_PADDED: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr,
    KC_UNIT: tl.constexpr, VC_UNIT: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):
    """Store a block of heads of the keys, or of the values, of one token."""
    block = tl.program_id(0) % (K_BLOCKS + V_BLOCKS)
    token = (tl.program_id(0) // (K_BLOCKS + V_BLOCKS)).to(tl.int64)
    at_page, at_slot, exists = _slot_of(slots, token, tokens, slot_step, page, count)
    if block < K_BLOCKS:
        head = block * K_BLOCK + tl.arange(0, K_BLOCK)
        _store_heads(
            k + token * k_token, k_cache + at_page * kc_page + at_slot * kc_slot, k_scale, head, heads, exists,
            k_head, k_column, kc_head, kc_column, ks_step, K_DIM, K_PADDED, K_UNIT, KC_UNIT, K_SCALED, FORMAT, NATIVE)
    else:
        head = (block - K_BLOCKS) * V_BLOCK + tl.arange(0, V_BLOCK)
        _store_heads(
            v + token * v_token, v_cache + at_page * vc_page + at_slot * vc_slot, v_scale, head, heads, exists,
            v_head, v_column, vc_head, vc_column, vs_step, V_DIM, V_PADDED, V_UNIT, VC_UNIT, V_SCALED, FORMAT, NATIVE)
# fmt: on


class Heads(NamedTuple):
    """How the heads of a token are cut: width, its power of two, heads of a program, programs."""

    dim: int
    padded: int
    block: int
    blocks: int


_plans: Final = host.Steps()


def heads_of(heads: Any, dim: int) -> Heads:
    """Return how heads are cut: about 1024 elements to a program. None where there is nothing to store."""
    padded = host.pow2(max(dim, 1))
    block = min(host.pow2(max(int(heads), 1)), max(1, 1024 // padded))
    return Heads(dim, padded, block, -(-int(heads) // block) if dim else 0)


def cache_format(x: Tensor, cache: Tensor) -> tuple[str, bool]:
    """Return the format that rows of ``x`` take in the cache, and whether the device converts to it."""
    if cache.dtype not in host.FP8 or x.dtype == cache.dtype:
        return "float", False
    return host.FP8[cache.dtype][0], host.is_native(cache.dtype, cache.device)


def plain(x: Tensor) -> Tensor:
    """Return ``x``, fp8 as bytes."""
    return host.as_bytes(x) if x.dtype in host.FP8 else x


def step_of(scale: Tensor | None) -> Any:
    """Return the stride of scales of heads: 0 where there is one for all."""
    return 0 if scale is None or scale.dim() == 0 or scale.shape[0] == 1 else scale.stride(0)


def store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write ``k`` and ``v [T, heads, D]`` to their slots of the caches ``[pages, page, heads, D]``."""
    form, native = cache_format(k, k_cache)
    tensors = (plain(k), plain(v), plain(k_cache), plain(v_cache), slots, k_scale, v_scale)
    host.run(_plans, _work, tensors, form, native)


def _work(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    form: str,
    native: bool,
) -> list[host.Program]:
    heads, page = k.shape[1], k_cache.shape[1]
    of_k, of_v = (heads_of(heads, int(x.shape[2])) for x in (k, v))
    each = of_k.blocks + of_v.blocks
    if each == 0 or (not is_traced(k) and k.shape[0] == 0):
        return []
    count = k_cache.shape[0] * page
    strides = (*k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(), step_of(k_scale), step_of(v_scale))
    arguments = (
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k_scale,
        v_scale,
        k.shape[0],
        heads,
        page,
        count,
        slots.stride(0),
        *strides,
    )
    constants = {
        "K_DIM": of_k.dim, "V_DIM": of_v.dim, "K_PADDED": of_k.padded, "V_PADDED": of_v.padded, "K_BLOCK": of_k.block,
        "V_BLOCK": of_v.block, "K_BLOCKS": of_k.blocks, "V_BLOCKS": of_v.blocks,
        **units(K_UNIT=k, V_UNIT=v, KC_UNIT=k_cache, VC_UNIT=v_cache),
        "K_SCALED": k_scale is not None, "V_SCALED": v_scale is not None, "FORMAT": form, "NATIVE": native,
        "num_warps": host.warps(max(of_k.block * of_k.padded, of_v.block * of_v.padded), 8),
    }  # fmt: skip
    return [host.Program(_store, (torch.sym_max(1, k.shape[0]) * each,), arguments, constants)]


def units(**tensors: Tensor) -> dict[str, bool]:
    """Return for each tensor whether its last stride is 1."""
    return {name: bool(x.stride(-1) == 1) for name, x in tensors.items()}


def case(chip: host.Chip, name: str, heads: int, dim: int, v_dim: int, form: str, *, scaled: bool) -> Any:
    """Return what a test without a GPU compiles: bf16 rows into a cache of bf16 or of bytes."""
    of_k, of_v = heads_of(heads, dim), heads_of(heads, v_dim)
    constants = {
        "K_DIM": of_k.dim, "V_DIM": of_v.dim, "K_PADDED": of_k.padded, "V_PADDED": of_v.padded, "K_BLOCK": of_k.block,
        "V_BLOCK": of_v.block, "K_BLOCKS": of_k.blocks, "V_BLOCKS": of_v.blocks,
        **dict.fromkeys(("K_UNIT", "V_UNIT", "KC_UNIT", "VC_UNIT"), True), "K_SCALED": scaled, "V_SCALED": scaled,
        "FORMAT": form, "NATIVE": False,
    }  # fmt: skip
    cache = "*bf16" if form == "float" else "*u8"
    types = {
        "k": "*bf16",
        "v": "*bf16",
        "k_cache": cache,
        "v_cache": cache,
        "slots": "*i64",
        "count": "i32",
        "tokens": "i32",
    }
    types |= {"k_scale": "*fp32", "v_scale": "*fp32", "page": "i32", "heads": "i32"}
    types |= dict.fromkeys(("k_column", "v_column", "kc_column", "vc_column", "slot_step"), "1")
    elements = max(of_k.block * of_k.padded, of_v.block * of_v.padded)
    return host.compile_case(name, _store, constants, types, {"num_warps": host.warps(elements, 8, hip=chip.hip)})
