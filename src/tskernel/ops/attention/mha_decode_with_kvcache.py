"""mha_decode_with_kvcache: attention of the newest tokens of each request against a paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.checks import empty, wide
from tskernel.library import Cost, Make, Sample, op
from tskernel.ops.attention import _checks as checks
from tskernel.ops.attention._cost import paged_cost, token_bytes
from tskernel.ops.attention._reference import dequantize, output_dtype, paged_attention, scale_or_default
from tskernel.ops.attention._samples import decode_samples


@op(
    out=True,
    lse=True,
    roles={"q": "q", "kv": "k_cache"},
    dynamic=("max_seqlen_k",),
    traits={
        "head_dim": 128,
        "head_dim_v": 128,
        "causal": True,
        "window": False,
        "logit_cap": False,
        "sinks": False,
        "scaled_kv": False,
        "gqa_ratio": 8,
        "page_size": 64,
        "q_len": 1,
    },
    shard={
        "heads": {
            "q": 1,
            "k_cache": 2,
            "v_cache": 2,
            "sinks": 0,
            "q_scale": 0,
            "k_scale": 0,
            "v_scale": 0,
            "return": 1,
            "lse": 1,
        },
    },
    autocast=("q",),
)
def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int = 1,
    *,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of the last ``max_seqlen_q`` tokens of each request over paged keys and values.

    Every request has exactly ``max_seqlen_q`` query rows (more than one to verify speculated tokens), and token j
    sees the first ``len - (max_seqlen_q - 1 - j)`` keys, so the causal mask is always on. Token t of request b lives
    in page ``page_table[b, t // page_size]`` at offset ``t % page_size``; ``cache_seqlens[b]`` tokens are visible,
    the queries' own included. With ``window_left = w >= 0`` a query sees its own position and the w keys before it.
    Scores are scaled, capped (``cap * tanh(s / cap)``, 0 = off), masked, then normalized; ``sinks`` adds
    ``exp(sink)`` per head to the denominator only. A row that sees no key (length 0 pads a recorded batch) is 0 with
    LSE -inf. Table entries past a length are never used and unused cache slots may hold NaN.

    Shapes: ``q [B * max_seqlen_q, Hq, D]``, ``k_cache [pages, page_size, Hkv, D]``, ``v_cache [pages, page_size, Hkv,
    Dv]`` (any strides, the last one 1), ``page_table [B, columns]``, ``cache_seqlens [B]``, ``sinks [Hq]``,
    ``q_scale`` one element or ``[Hq]``, ``k_scale, v_scale`` one element or ``[Hkv]`` -> ``[B * max_seqlen_q, Hq,
    Dv]``; LSE ``[B * max_seqlen_q, Hq]``. ``max_seqlen_k`` bounds the lengths from above; ``max_seqlen_q`` is exact.
    Dtypes: q, k_cache, v_cache alike in fp32, fp16 or bf16, or the caches fp8, or all fp8 (then the result is bf16);
    table and lengths int32; scales fp32 (value = stored * scale); sinks fp32 or bf16. LSE is fp32, the natural log
    over scaled and capped scores without the sink.
    Raises: ValueError for shapes, dtypes or head counts that do not go together, rows that are no multiple of
    ``max_seqlen_q``, a negative cap, ``window_left < -1``.
    Source: Kwon et al. 2023 (paged attention), https://arxiv.org/abs/2309.06180; sinks as in GPT-OSS.
    """
    out, lse = paged_attention(
        dequantize(q, q_scale, wide(q)).unflatten(0, (page_table.shape[0], max_seqlen_q)),
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        max_seqlen_k,
        q_lengths=max_seqlen_q,
        is_causal=True,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        window_left=window_left,
        logit_cap=logit_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    out = out.flatten(0, 1).to(output_dtype(q))
    return (out, lse.flatten(0, 1)) if return_lse else out


@mha_decode_with_kvcache.check
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    checks.check_paged(q, k_cache, v_cache)
    checks.check_query_groups(q, max_seqlen_q)
    checks.check_table(page_table, cache_seqlens, q.shape[0] // max_seqlen_q)
    checks.check_scores(q.shape[1], logit_cap=logit_cap, window_left=window_left, sinks=sinks)
    checks.check_scale("q_scale", q_scale, q.shape[1])
    checks.check_scale("k_scale", k_scale, k_cache.shape[2])
    checks.check_scale("v_scale", v_scale, k_cache.shape[2])


@mha_decode_with_kvcache.fake
def _(q: Tensor, v_cache: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    out = empty((q.shape[0], q.shape[1], v_cache.shape[3]), q, output_dtype(q))
    return (out, empty(q.shape[:2], q, wide(q))) if return_lse else out


@mha_decode_with_kvcache.trait_values
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> dict[str, object]:
    common = checks.mha_traits(
        q,
        k_cache,
        v_cache,
        causal=True,
        window_left=window_left,
        logit_cap=logit_cap,
        sinks=sinks,
        scales=(q_scale, k_scale, v_scale),
    )
    return {**common, "page_size": k_cache.shape[1], "q_len": max_seqlen_q}


@mha_decode_with_kvcache.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from decode_samples(make, dtype)


@mha_decode_with_kvcache.cost
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, max_seqlen_k: int) -> Cost:
    return paged_cost(q, page_table.shape[0], max_seqlen_k, token_bytes(k_cache, v_cache), v_cache.shape[3])
