"""mha_extend_with_kvcache: attention of new tokens against a paged KV cache that already holds them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.checks import empty, wide
from tskernel.library import Cost, Make, Sample, op
from tskernel.ops.attention import _checks as checks
from tskernel.ops.attention._cost import paged_cost, token_bytes
from tskernel.ops.attention._layout import Ragged
from tskernel.ops.attention._reference import dequantize, output_dtype, paged_attention, scale_or_default
from tskernel.ops.attention._samples import extend_samples


@op(
    out=True,
    lse=True,
    roles={"q": "q", "kv": "k_cache"},
    dynamic=("max_seqlen_q", "max_seqlen_k"),
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
def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = True,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of packed queries, the last tokens of their sequences, over paged keys and values.

    Token t of sequence b lives in page ``page_table[b, t // page_size]`` at offset ``t % page_size``;
    ``cache_seqlens[b]`` tokens are visible, the queries' own included. Causal query i sees keys ``j <= i + (k_len -
    q_len)``; with ``window_left = w >= 0`` it sees its own position and the w keys before it, whether or not
    ``is_causal`` is set. Scores are scaled, capped (``cap * tanh(s / cap)``, 0 = off), masked, then normalized;
    ``sinks`` adds ``exp(sink)`` per head to the denominator only. A row that sees no key, or that belongs to no
    sequence, is 0 with LSE -inf. Table entries past a length are never used and unused cache slots may hold NaN.

    Shapes: ``q [Tq, Hq, D]``, ``cu_seqlens_q [B+1]`` from 0, ``k_cache [pages, page_size, Hkv, D]``, ``v_cache
    [pages, page_size, Hkv, Dv]`` (any strides, the last one 1), ``page_table [B, columns]``, ``cache_seqlens [B]``,
    ``sinks [Hq]``, ``q_scale`` one element or ``[Hq]``, ``k_scale, v_scale`` one element or ``[Hkv]`` -> ``[Tq, Hq,
    Dv]``; LSE ``[Tq, Hq]``. ``max_seqlen_q, max_seqlen_k`` bound the lengths from above.
    Dtypes: q, k_cache, v_cache alike in fp32, fp16 or bf16, or the caches fp8, or all fp8 (then the result is bf16);
    offsets, table and lengths int32; scales fp32 (value = stored * scale); sinks fp32 or bf16. LSE is fp32, the
    natural log over scaled and capped scores without the sink.
    Raises: ValueError for shapes, dtypes or head counts that do not go together, a negative cap, ``window_left <
    -1``.
    Source: Kwon et al. 2023 (paged attention), https://arxiv.org/abs/2309.06180; sinks as in GPT-OSS.
    """
    queries = Ragged(cu_seqlens_q, q.shape[0], max_seqlen_q)
    out, lse = paged_attention(
        queries.pad(dequantize(q, q_scale, wide(q))),
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        max_seqlen_k,
        q_lengths=queries.lengths,
        is_causal=is_causal,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        window_left=window_left,
        logit_cap=logit_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    out = queries.unpad(out, 0.0).to(output_dtype(q))
    return (out, queries.unpad(lse, float("-inf"))) if return_lse else out


@mha_extend_with_kvcache.check
def _(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    checks.check_paged(q, k_cache, v_cache)
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q)
    checks.check_table(page_table, cache_seqlens, cu_seqlens_q.shape[0] - 1)
    checks.check_scores(q.shape[1], logit_cap=logit_cap, window_left=window_left, sinks=sinks)
    checks.check_scale("q_scale", q_scale, q.shape[1])
    checks.check_scale("k_scale", k_scale, k_cache.shape[2])
    checks.check_scale("v_scale", v_scale, k_cache.shape[2])


@mha_extend_with_kvcache.fake
def _(q: Tensor, v_cache: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    out = empty((q.shape[0], q.shape[1], v_cache.shape[3]), q, output_dtype(q))
    return (out, empty(q.shape[:2], q, wide(q))) if return_lse else out


@mha_extend_with_kvcache.trait_values
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    is_causal: bool,
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
        causal=is_causal,
        window_left=window_left,
        logit_cap=logit_cap,
        sinks=sinks,
        scales=(q_scale, k_scale, v_scale),
    )
    return {**common, "page_size": k_cache.shape[1]}


@mha_extend_with_kvcache.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from extend_samples(make, dtype)


@mha_extend_with_kvcache.cost
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, max_seqlen_k: int) -> Cost:
    return paged_cost(q, page_table.shape[0], max_seqlen_k, token_bytes(k_cache, v_cache), v_cache.shape[3])
