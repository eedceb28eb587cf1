"""Argument checks and traits that the attention ops share; both read metadata only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.checks import FLOATS, FP8, expect, expect_dim, expect_dtype, expect_last_contiguous, expect_shape

FP32_BF16 = (torch.float32, torch.bfloat16)


def check_offsets(name: str, offsets: Tensor | None) -> None:
    """Check row offsets: int32 ``[B + 1]``."""
    expect_dtype(name, offsets, (torch.int32,))
    expect_dim(name, offsets, 1)
    if offsets is not None:
        expect(offsets.shape[0] >= 1, f"{name}.shape", "at least one offset", tuple(offsets.shape))


def check_formats(q: Tensor, k_name: str, k: Tensor, v_name: str, v: Tensor) -> None:
    """Check the dtypes of queries and keys: equal, or fp8 keys under wider queries."""
    expect_dtype("q", q, (*FLOATS, *FP8))
    expect_dtype(k_name, k, (q.dtype,) if q.dtype in FP8 else (q.dtype, *FP8))
    expect_dtype(v_name, v, (k.dtype,))


def check_heads(q: Tensor, k_name: str, k: Tensor) -> None:
    """Check head counts and the width that queries share with keys."""
    width = q.shape[-1]
    expect(width > 0, "q.shape", "a head width of at least 1", tuple(q.shape))
    expect_shape(k_name, k, (*(None,) * (k.dim() - 1), width))
    q_heads, kv_heads = q.shape[-2], k.shape[-2]
    expect(kv_heads > 0, f"{k_name}.shape", "at least one head", tuple(k.shape))
    expect(q_heads > 0, "q.shape", "at least one head", tuple(q.shape))
    expect(q_heads % kv_heads == 0, "q.shape", f"a multiple of the {kv_heads} heads of {k_name}", tuple(q.shape))


def check_ragged(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check packed queries, keys and values."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        expect_dim(name, tensor, 3)
    check_formats(q, "k", k, "v", v)
    check_heads(q, "k", k)
    expect_shape("v", v, (k.shape[0], k.shape[1], None))
    expect(v.shape[2] > 0, "v.shape", "a head width of at least 1", tuple(v.shape))


def check_cache(name: str, cache: Tensor) -> None:
    """Check the form of one paged cache ``[pages, page_size, heads, width]``."""
    expect_dim(name, cache, 4)
    expect(cache.shape[0] > 0, f"{name}.shape", "at least one page", tuple(cache.shape))
    expect(cache.shape[1] > 0, f"{name}.shape", "a page size of at least 1", tuple(cache.shape))
    expect_last_contiguous(name, cache)


def check_paged(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check queries ``[T, Hq, D]`` against a K and a V cache."""
    expect_dim("q", q, 3)
    check_cache("k_cache", k_cache)
    check_cache("v_cache", v_cache)
    check_formats(q, "k_cache", k_cache, "v_cache", v_cache)
    check_heads(q, "k_cache", k_cache)
    expect_shape("v_cache", v_cache, (*k_cache.shape[:3], None))
    expect(v_cache.shape[3] > 0, "v_cache.shape", "a head width of at least 1", tuple(v_cache.shape))


def check_latent(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, qk_nope_head_dim: int) -> None:
    """Check absorbed queries ``[..., H, R + Dr]`` against the cache of latent vectors."""
    check_cache("kv_cache", kv_cache)
    check_formats(q, "kv_cache", kv_cache, "kv_cache", kv_cache)
    expect_shape("kv_cache", kv_cache, (None, None, 1, q.shape[-1]))
    check_heads(q, "kv_cache", kv_cache)
    expect(kv_lora_rank > 0, "kv_lora_rank", "at least 1", kv_lora_rank)
    expect(kv_lora_rank <= q.shape[-1], "kv_lora_rank", f"at most {q.shape[-1]}, the width of q", kv_lora_rank)
    expect(qk_nope_head_dim > 0, "qk_nope_head_dim", "at least 1", qk_nope_head_dim)


def check_table(page_table: Tensor, cache_seqlens: Tensor, batch: Any) -> None:
    """Check the page table and the lengths of ``batch`` sequences."""
    expect_dtype("page_table", page_table, (torch.int32,))
    expect_shape("page_table", page_table, (batch, None))
    expect_dtype("cache_seqlens", cache_seqlens, (torch.int32,))
    expect_shape("cache_seqlens", cache_seqlens, (batch,))


def check_query_groups(q: Tensor, max_seqlen_q: int) -> None:
    """Check that ``q`` holds ``max_seqlen_q`` tokens of each request."""
    expect(max_seqlen_q >= 1, "max_seqlen_q", "at least 1", max_seqlen_q)
    expect(q.shape[0] % max_seqlen_q == 0, "q.shape", f"a multiple of max_seqlen_q={max_seqlen_q} rows", tuple(q.shape))


def check_scores(q_heads: int, *, logit_cap: float, window_left: int = -1, sinks: Tensor | None = None) -> None:
    """Check the options that change scores."""
    expect(0.0 <= logit_cap < float("inf"), "logit_cap", "a finite number, at least 0", logit_cap)
    expect(window_left >= -1, "window_left", "-1 or more", window_left)
    expect_dtype("sinks", sinks, FP32_BF16)
    expect_shape("sinks", sinks, (q_heads,))


def check_scale(name: str, scale: Tensor | None, heads: int) -> None:
    """Check a dequantization scale: fp32, one element or one per head."""
    if scale is None:
        return
    expect_dtype(name, scale, (torch.float32,))
    if scale.numel() != 1:
        expect_dim(name, scale, 1)
        expect(scale.shape[0] == heads, f"{name}.shape", f"one element or ({heads},)", tuple(scale.shape))


def mha_traits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    scales: tuple[Tensor | None, ...],
) -> dict[str, object]:
    """Return the traits that all MHA ops state."""
    return {
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "causal": causal,
        "window": bool(window_left >= 0),
        "logit_cap": logit_cap != 0.0,
        "sinks": sinks is not None,
        "scaled_kv": any(s is not None for s in scales),
        "gqa_ratio": q.shape[-2] // k.shape[-2],
    }
