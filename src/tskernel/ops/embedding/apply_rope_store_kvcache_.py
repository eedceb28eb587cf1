"""apply_rope_store_kvcache_: rotate queries and keys in place and write keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, expect_dim, nbytes, op
from tskernel.ops.embedding._rope import (
    as_heads,
    check_flat_or_heads,
    check_rope,
    rope_,
    rope_samples,
    rope_traits,
)
from tskernel.ops.kvcache._samples import make_caches, make_slots
from tskernel.ops.kvcache._store import check_kv, check_scale, check_slots, scatter_rows, to_cache_dtype


@op(
    mutates=("q", "k", "k_cache", "v_cache"),
    roles=("q", "cos_sin_cache", "k_cache"),
    traits={"rotary_dim": 128, "head_dim": 128, "is_neox": True, "page_size": 64, "scaled_kv": False},
    shard={"heads": {"q": 1, "k": 1, "v": 1, "k_cache": 2, "v_cache": 2, "k_scale": 0, "v_scale": 0}},
)
def apply_rope_store_kvcache_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    is_neox: bool = True,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Do ``apply_rope_`` on ``q`` and ``k``, then ``store_kvcache`` of the rotated ``k`` and of ``v``.

    The cache receives exactly what the two ops would write one after the other: ``k`` is rounded to its own dtype
    before it is stored. A token whose slot is skipped is rotated all the same.

    Shapes: ``positions [T]``, ``q [T, Hq, D]``, ``k [T, Hkv, D]``, ``v [T, Hkv, Dv]`` (any strides), or flat ``[T, H
    * D]`` with the D of the caches; ``cos_sin_cache [max_pos, rotary_dim]``, ``k_cache [pages, page_size, Hkv, D]``,
    ``v_cache [pages, page_size, Hkv, Dv]``, ``slot_mapping [T]``, the scales one element or ``[Hkv]``.
    Dtypes: ``q``, ``k`` and ``v`` fp32, fp16 or bf16, the same; ``cos_sin_cache`` any of these; the caches these or
    fp8, the same; ``positions`` int64 or int32; ``slot_mapping`` int64; the scales fp32.
    Raises: ValueError as ``apply_rope_`` and ``store_kvcache`` do.
    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864; Kwon et al. 2023, https://arxiv.org/abs/2309.06180.
    """
    size = k_cache.shape[3]
    rope_(positions, q, k, cos_sin_cache, is_neox, size)
    k, v = as_heads(k, size), as_heads(v, v_cache.shape[3])
    scatter_rows(k_cache, to_cache_dtype(k, k_scale, k_cache.dtype), slot_mapping)
    scatter_rows(v_cache, to_cache_dtype(v, v_scale, v_cache.dtype), slot_mapping)


@apply_rope_store_kvcache_.check
def _(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    expect_dim("k_cache", k_cache, 4)
    expect_dim("v_cache", v_cache, 4)
    check_rope(positions, q, k, cos_sin_cache, k_cache.shape[3])
    check_flat_or_heads("v", v, v_cache.shape[3])
    k, v = as_heads(k, k_cache.shape[3]), as_heads(v, v_cache.shape[3])
    check_kv(k, v, k_cache, v_cache)
    check_slots(slot_mapping, k.shape[0])
    check_scale("k_scale", k_scale, k, k.shape[1])
    check_scale("v_scale", v_scale, v, k.shape[1])


@apply_rope_store_kvcache_.trait_values
def _(
    q: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    is_neox: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> dict[str, object]:
    return {
        **rope_traits(cos_sin_cache, is_neox, k_cache.shape[3]),
        "page_size": k_cache.shape[1],
        "scaled_kv": k_scale is not None or v_scale is not None,
    }


@apply_rope_store_kvcache_.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    scale = make.tensor([0.5], torch.float32)
    for i, args in enumerate(rope_samples(make, dtype)):
        name, q, k = args.pop("name"), args["q"], args["k"]
        size = args.pop("head_size", k.shape[-1])
        fp8 = i % 3 == 2
        cache_dtype = torch.float8_e4m3fn if fp8 else dtype
        k_cache, v_cache = make_caches(make, cache_dtype, 3, 4, as_heads(k, size).shape[1], size, size)
        args |= {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": make_slots(make, q.shape[0], 12)}
        scales = {"k_scale": scale, "v_scale": scale} if fp8 else {}
        yield Sample(name, v=make.randn(k.shape, dtype), **args, **scales)
    args = {"positions": make.tensor([], torch.int64), "slot_mapping": make.tensor([], torch.int64)}
    args |= {"q": make.randn((0, 4, 8), dtype), "k": make.randn((0, 0, 8), dtype), "v": make.randn((0, 0, 8), dtype)}
    k_cache, v_cache = make_caches(make, dtype, 3, 4, 0, 8, 8)
    yield Sample("no_heads", **args, cos_sin_cache=make.randn((32, 8), dtype), k_cache=k_cache, v_cache=v_cache)


@apply_rope_store_kvcache_.cost
def _(positions: Tensor, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> Cost:
    stored = (k.numel() + v.numel()) * k_cache.element_size()
    return Cost(bytes=2 * nbytes(q, k) + nbytes(v, positions, slot_mapping) + stored, flops=3 * (q.numel() + k.numel()))
