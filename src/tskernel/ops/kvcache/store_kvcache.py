"""store_kvcache: write the keys and values of new tokens into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, nbytes, op
from tskernel.ops.kvcache._samples import store_samples
from tskernel.ops.kvcache._store import check_kv, check_scale, check_slots, scatter_rows, to_cache_dtype


@op(
    mutates=("k_cache", "v_cache"),
    roles=("k", "k_cache"),
    traits={"page_size": 64, "head_dim": 128, "scaled_kv": False},
    shard={"heads": {"k": 1, "v": 1, "k_cache": 2, "v_cache": 2, "k_scale": 0, "v_scale": 0}},
)
def store_kvcache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write row t of ``k`` and ``v`` to slot ``slot_mapping[t]``: page ``slot // page_size``, then the offset in it.

    A negative slot, or one past the cache, is skipped: its rows are not stored and no memory of the cache changes.
    Slots that are stored must be distinct; with duplicates it is not defined which row stays. With a scale the cache
    holds ``x / scale``. An fp8 cache saturates and takes its encoding from its dtype; without a scale it holds the
    rounded ``x``.

    Shapes: ``k [T, Hkv, D]``, ``v [T, Hkv, Dv]`` (any strides), ``k_cache [pages, page_size, Hkv, D]``,
    ``v_cache [pages, page_size, Hkv, Dv]``, each written through its own strides, which may interleave the two;
    ``slot_mapping [T]``; ``k_scale``, ``v_scale`` one element or ``[Hkv]``.
    Dtypes: ``k`` and ``v`` fp32, fp16 or bf16, or already in the dtype of the caches (then copied bit by bit, without a
    scale); the caches fp32, fp16, bf16 or fp8, the same; ``slot_mapping`` int64; the scales fp32; one rounding.
    Raises: ValueError when shapes or dtypes disagree, or the cache has no slot.
    Source: Kwon et al. 2023, https://arxiv.org/abs/2309.06180.
    """
    scatter_rows(k_cache, to_cache_dtype(k, k_scale, k_cache.dtype), slot_mapping)
    scatter_rows(v_cache, to_cache_dtype(v, v_scale, v_cache.dtype), slot_mapping)


@store_kvcache.check
def _(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check_kv(k, v, k_cache, v_cache)
    check_slots(slot_mapping, k.shape[0])
    check_scale("k_scale", k_scale, k, k.shape[1])
    check_scale("v_scale", v_scale, v, k.shape[1])


@store_kvcache.trait_values
def _(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> dict[str, object]:
    scaled = k_scale is not None or v_scale is not None
    return {"page_size": k_cache.shape[1], "head_dim": k_cache.shape[3], "scaled_kv": scaled}


@store_kvcache.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for args in store_samples(make, dtype):
        yield Sample(args.pop("name"), **args)


@store_kvcache.cost
def _(k: Tensor, v: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> Cost:
    stored = (k.numel() + v.numel()) * k_cache.element_size()
    return Cost(bytes=nbytes(k, v, slot_mapping) + stored, flops=0)
