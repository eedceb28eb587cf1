"""The score arithmetic that every attention op means, on padded tensors and in wide precision."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.checks import FP8, wide
from tskernel.ops.attention._layout import Paged, Ragged, visible_keys


def output_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of an attention output: that of ``q``, bf16 for fp8 queries."""
    return torch.bfloat16 if q.dtype in FP8 else q.dtype


def scale_or_default(softmax_scale: float | None, width: int) -> float:
    """Return the softmax scale; None means 1/sqrt(width), an explicit 0.0 stays 0.0."""
    return width**-0.5 if softmax_scale is None else softmax_scale


def dequantize(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x [..., heads, width] * scale`` in ``dtype``; ``scale`` is one element or one per head."""
    x = x.to(dtype)
    return x if scale is None else x * scale.to(dtype).reshape(-1, 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend in the dtype of the inputs.

    Shapes: ``q [B, Lq, Hq, D]``, ``k [B, Lk, Hkv, D]``, ``v [B, Lk, Hkv, Dv]``, ``seen [B, Lq, Lk]`` with Lk >= 1
    -> ``out [B, Lq, Hq, Dv]`` and ``lse [B, Lq, Hq]``; a row that sees no key gives 0 and -inf.
    """
    batch, q_len, q_heads, width = q.shape
    kv_heads = k.shape[2]
    group = q_heads // kv_heads
    # Keys that no query sees may hold anything. Their scores are overwritten by the mask; their values must be zeroed
    # before the product, because 0 * NaN is NaN.
    v = torch.where(seen.any(1)[..., None, None], v, 0)

    # The queries that share a KV head become rows of one product, so that its keys are not repeated.
    rows = q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * q_len, width)
    scores = (rows @ k.permute(0, 2, 3, 1)).unflatten(2, (group, q_len)) * scale  # [B, Hkv, G, Lq, Lk]
    if logit_cap != 0.0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))

    top = scores.amax(-1)
    top = torch.where(top == float("-inf"), 0, top)
    weights = torch.exp(scores - top.unsqueeze(-1))
    total = weights.sum(-1)
    lse = total.log() + top  # before the sink, which is no key
    if sinks is not None:
        total = total + torch.exp(sinks.to(q.dtype).view(kv_heads, group, 1) - top)
    out = (weights.flatten(2, 3) @ v.permute(0, 2, 1, 3)).unflatten(2, (group, q_len))  # [B, Hkv, G, Lq, Dv]
    out = out / torch.where(total == 0, 1, total).unsqueeze(-1)
    # With one KV head the permuted result reshapes to a view: ops return contiguous storage.
    out = out.permute(0, 3, 1, 2, 4).reshape(batch, q_len, q_heads, v.shape[-1]).contiguous()
    return out, lse.permute(0, 3, 1, 2).reshape(batch, q_len, q_heads).contiguous()


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Ragged,
    keys: Ragged,
    *,
    is_causal: bool,
    scale: float,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend packed queries to packed keys; return ``out [Tq, Hq, Dv]`` and ``lse [Tq, Hq]``."""
    dtype = wide(q)
    out, lse = attend(
        queries.pad(dequantize(q, q_scale, dtype)),
        keys.pad(dequantize(k, k_scale, dtype)),
        keys.pad(dequantize(v, v_scale, dtype)),
        visible_keys(
            queries.lengths,
            keys.lengths,
            queries.longest,
            keys.longest,
            causal=is_causal,
            window_left=window_left,
        ),
        scale=scale,
        logit_cap=logit_cap,
        sinks=sinks,
    )
    return queries.unpad(out, 0.0).to(output_dtype(q)), queries.unpad(lse, float("-inf"))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    *,
    q_lengths: Tensor | int,
    is_causal: bool,
    scale: float,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend padded queries ``q [B, Lq, Hq, D]``, already wide, to the pages of their sequences."""
    paged = Paged(page_table, cache_seqlens, k_cache, max_seqlen_k)
    seen = visible_keys(q_lengths, cache_seqlens, q.shape[1], paged.longest, causal=is_causal, window_left=window_left)
    return attend(
        q,
        dequantize(paged.gather(k_cache), k_scale, q.dtype),
        dequantize(paged.gather(v_cache), v_scale, q.dtype),
        seen & paged.known.unsqueeze(1),
        scale=scale,
        logit_cap=logit_cap,
        sinks=sinks,
    )


def latent_attention(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    *,
    q_lengths: Tensor | int,
    kv_lora_rank: int,
    is_causal: bool,
    scale: float,
    logit_cap: float,
) -> tuple[Tensor, Tensor]:
    """Attend padded, wide ``q [B, Lq, H, R + Dr]`` to cached latent vectors, whose first R entries are the values."""
    paged = Paged(page_table, cache_seqlens, kv_cache, max_seqlen_k)
    seen = visible_keys(q_lengths, cache_seqlens, q.shape[1], paged.longest, causal=is_causal)
    keys = paged.gather(kv_cache).to(q.dtype)
    return attend(
        q,
        keys,
        keys[..., :kv_lora_rank],
        seen & paged.known.unsqueeze(1),
        scale=scale,
        logit_cap=logit_cap,
    )
