"""Inputs of the ops that write a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tskernel.library import Make


def make_caches(
    make: Make, dtype: torch.dtype, pages: int, page_size: int, heads: int, k_dim: int, v_dim: int
) -> tuple[Tensor, Tensor]:
    """Return K and V caches that lie interleaved in one buffer, as servers keep them: row stride ``k_dim + v_dim``."""
    both = make.randn((pages, page_size, heads, k_dim + v_dim), dtype)
    return both[..., :k_dim], both[..., k_dim:]


def make_slots(make: Make, tokens: int, slots: int) -> Tensor:
    """Return distinct slots in random order, except that every third one does not exist (-1, or past the cache)."""
    order = make.permutation(slots, torch.int64)[:tokens]
    order[1::3] = -1
    order[4::6] = slots
    return order


def store_samples(make: Make, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield named arguments of ``store_kvcache``, each with a ``name``."""
    fp8 = torch.float8_e4m3fn
    scale, per_head = make.tensor([0.5], torch.float32), make.tensor([0.25, 2.0], torch.float32)
    sizes: dict[str, tuple[int, int, int, int, int, int, torch.dtype]] = {
        # tokens, pages, page_size, heads, k_dim, v_dim, cache dtype
        "ordinary": (5, 3, 16, 2, 64, 64, dtype),
        "one": (1, 1, 1, 1, 1, 1, dtype),
        "odd": (9, 4, 3, 3, 77, 33, dtype),
        "empty": (0, 2, 16, 2, 64, 64, dtype),
        "no_heads": (3, 2, 16, 0, 64, 64, dtype),
        "fp8": (5, 3, 16, 2, 64, 64, fp8),
    }
    for name, (t, pages, page, h, dk, dv, cache_dtype) in sizes.items():
        k_cache, v_cache = make_caches(make, cache_dtype, pages, page, h, dk, dv)
        slots = make_slots(make, t, pages * page)
        k, v = make.randn((t, h, dk), dtype), make.randn((t, h, dv), dtype)
        yield {"name": name, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}
    qkv = make.randn((5, 8, 64), dtype)
    for name, k_scale, v_scale in (
        ("scaled", scale, scale),
        ("per_head", per_head, per_head),
        ("k_scaled", scale, None),
    ):
        k_cache, v_cache = make_caches(make, fp8, 3, 16, 2, 64, 64)
        args = {"k": qkv[:, 4:6], "v": qkv[:, 6:], "k_cache": k_cache, "v_cache": v_cache}
        yield {"name": name, **args, "slot_mapping": make_slots(make, 5, 48), "k_scale": k_scale, "v_scale": v_scale}
    k_cache, v_cache = make_caches(make, fp8, 3, 16, 2, 64, 64)
    args = {"k": qkv[:, 4:6].to(fp8), "v": qkv[:, 6:].to(fp8), "k_cache": k_cache, "v_cache": v_cache}
    yield {"name": "raw_fp8", **args, "slot_mapping": make_slots(make, 5, 48)}
    separate = {
        "k_cache": make.randn((2, 2, 8, 64), dtype).transpose(1, 2),
        "v_cache": make.randn((2, 8, 2, 64), dtype),
    }
    yield {"name": "head_major", "k": qkv[:, 4:6], "v": qkv[:, 6:], **separate, "slot_mapping": make_slots(make, 5, 16)}
    separate = {"k_cache": make.randn((2, 8, 2, 64), dtype), "v_cache": make.randn((2, 8, 2, 64), dtype)}
    none = torch.full_like(make_slots(make, 5, 16), -1)
    yield {"name": "all_skipped", "k": qkv[:, 4:6], "v": qkv[:, 6:], **separate, "slot_mapping": none}
