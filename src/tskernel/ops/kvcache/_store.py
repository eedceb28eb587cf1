"""Writing token rows into a paged cache: the one scatter, the conversion to the cache dtype, and their checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tskernel.library import FLOATS, FP8, expect, expect_dim, expect_dtype, expect_shape, wide
from tskernel.ops.quantization._math import saturate_to_fp8


def to_cache_dtype(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x [T, H, D] / scale`` in the dtype of the cache; fp8 saturates."""
    if scale is None and x.dtype == dtype:
        return x
    h = x.to(wide(x))
    if scale is not None:
        h = h / scale.to(h.dtype).reshape(-1, 1)
    return saturate_to_fp8(h, dtype) if dtype in FP8 else h.to(dtype)


def scatter_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Set ``cache[slot // page_size, slot % page_size]`` to the row of each slot that exists; skip the other rows.

    A scatter has no mask and a boolean index would make the host wait, so every skipped row repeats the write of the
    first row that is not skipped: same place, same value, hence no race. If all are skipped, slot 0 is rewritten with
    what it holds.
    """
    pages, page_size = cache.shape[0], cache.shape[1]
    exists = (slots >= 0) & (slots < pages * page_size)
    # One more entry, "slot 0 as it is", stands behind the rows: it is the first that exists when no row does.
    first = F.pad(exists.to(torch.int8), (0, 1), value=1).argmax()
    source = torch.where(exists, torch.arange(slots.shape[0], device=slots.device), first)
    target = F.pad(slots, (0, 1)).index_select(0, source)
    values = torch.cat((rows, cache[:1, 0])).index_select(0, source)
    cache.index_put_((target // page_size, target % page_size), values)


def check_cache(name: str, cache: Tensor, heads: int | None, width: int | None) -> None:
    """Check the layout of a paged cache, which must have a slot at all."""
    expect_dtype(name, cache, (*FLOATS, *FP8))
    expect_shape(name, cache, (None, None, heads, width))
    expect(cache.shape[0] > 0, f"{name}.shape[0]", "at least one page", cache.shape[0])
    expect(cache.shape[1] > 0, f"{name}.shape[1]", "a page size of at least 1", cache.shape[1])


def check_stored(name: str, x: Tensor, cache: Tensor) -> None:
    """Check that ``x`` is floating, or already in the dtype of the cache."""
    expect_dtype(name, x, (*FLOATS, cache.dtype))


def check_slots(slot_mapping: Tensor, tokens: int) -> None:
    """Check the slot of each token."""
    expect_dtype("slot_mapping", slot_mapping, (torch.int64,))
    expect_shape("slot_mapping", slot_mapping, (tokens,))


def check_scale(name: str, scale: Tensor | None, x: Tensor, heads: int) -> None:
    """Check a scale: fp32, one element or one per KV head, and only for rows that are not quantized yet."""
    if scale is None:
        return
    expect(x.dtype not in FP8, name, "None for rows that are fp8 already", "a tensor")
    expect_dtype(name, scale, (torch.float32,))
    expect_dim(name, scale, 0, 1)
    size = scale.numel()
    expect((size == 1) | (size == heads), f"{name}.shape", f"one element or ({heads},)", tuple(scale.shape))


def check_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check that rows ``[T, Hkv, D]`` fit their caches."""
    expect_dim("k", k, 3)
    expect_shape("v", v, (k.shape[0], k.shape[1], None))
    check_cache("k_cache", k_cache, k.shape[1], k.shape[2])
    check_cache("v_cache", v_cache, k.shape[1], v.shape[2])
    expect_shape("v_cache", v_cache, (*k_cache.shape[:2], None, None))
    check_stored("k", k, k_cache)
    expect_dtype("v", v, (k.dtype,))
    expect_dtype("v_cache", v_cache, (k_cache.dtype,))
