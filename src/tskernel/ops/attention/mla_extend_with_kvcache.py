"""mla_extend_with_kvcache: absorbed latent attention of new tokens against a paged cache that already holds them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.checks import empty, expect_dim, wide
from tskernel.library import Cost, Make, Sample, op
from tskernel.ops.attention import _checks as checks
from tskernel.ops.attention._cost import paged_cost, token_bytes
from tskernel.ops.attention._layout import Ragged
from tskernel.ops.attention._reference import latent_attention, output_dtype, scale_or_default
from tskernel.ops.attention._samples import latent_samples


@op(
    out=True,
    lse=True,
    roles={"q": "q", "kv": "kv_cache"},
    dynamic=("max_seqlen_q", "max_seqlen_k"),
    traits={
        "kv_lora_rank": 512,
        "rope_dim": 64,
        "num_heads": 128,
        "causal": True,
        "logit_cap": False,
        "page_size": 64,
    },
    shard={"heads": {"q": 1, "return": 1, "lse": 1}},
    autocast=("q",),
)
def mla_extend_with_kvcache(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    logit_cap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Latent attention of packed queries, the last tokens of their sequences, over a paged cache of latent vectors.

    All heads read one row per token: its whole width is the key, its first ``kv_lora_rank`` entries are the value.
    The queries already contain the key up-projection (absorbed form). Causal query i sees keys ``j <= i + (k_len -
    q_len)``; ``cache_seqlens`` counts the queries' own tokens. Scores are scaled, capped (``cap * tanh(s / cap)``, 0
    = off), masked, normalized. A row that sees no key, or that belongs to no sequence, is 0 with LSE -inf.

    Shapes: ``q [Tq, H, R + Dr]``, ``kv_cache [pages, page_size, 1, R + Dr]`` (latent, then rotary part; last stride
    1), ``page_table [B, columns]``, ``cache_seqlens [B]``, ``cu_seqlens_q [B+1]`` from 0 -> ``[Tq, H, R]``; LSE
    ``[Tq, H]``. ``max_seqlen_q, max_seqlen_k`` bound the lengths. The default scale is 1/sqrt(qk_nope_head_dim + Dr),
    the width before absorption.
    Dtypes: q and kv_cache alike in fp32, fp16 or bf16, or the cache fp8, or both fp8 (then the result is bf16), fp8
    taken at scale 1; table, lengths and offsets int32. LSE is fp32, the natural log over scaled and capped scores.
    Raises: ValueError for shapes or dtypes that do not go together, a rank outside 1 to R + Dr, a negative cap.
    Source: DeepSeek-AI 2024 (DeepSeek-V2), https://arxiv.org/abs/2405.04434.
    """
    queries = Ragged(cu_seqlens_q, q.shape[0], max_seqlen_q)
    out, lse = latent_attention(
        queries.pad(q.to(wide(q))),
        kv_cache,
        page_table,
        cache_seqlens,
        max_seqlen_k,
        q_lengths=queries.lengths,
        kv_lora_rank=kv_lora_rank,
        is_causal=is_causal,
        scale=scale_or_default(softmax_scale, qk_nope_head_dim + q.shape[-1] - kv_lora_rank),
        logit_cap=logit_cap,
    )
    out = queries.unpad(out, 0.0).to(output_dtype(q))
    return (out, queries.unpad(lse, float("-inf"))) if return_lse else out


@mla_extend_with_kvcache.check
def _(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    logit_cap: float,
) -> None:
    expect_dim("q", q, 3)
    checks.check_latent(q, kv_cache, kv_lora_rank, qk_nope_head_dim)
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q)
    checks.check_table(page_table, cache_seqlens, cu_seqlens_q.shape[0] - 1)
    checks.check_scores(q.shape[1], logit_cap=logit_cap)


@mla_extend_with_kvcache.fake
def _(q: Tensor, kv_lora_rank: int, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    out = empty((*q.shape[:2], kv_lora_rank), q, output_dtype(q))
    return (out, empty(q.shape[:2], q, wide(q))) if return_lse else out


@mla_extend_with_kvcache.trait_values
def _(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, is_causal: bool, logit_cap: float) -> dict[str, object]:
    return {
        "kv_lora_rank": kv_lora_rank,
        "rope_dim": q.shape[-1] - kv_lora_rank,
        "num_heads": q.shape[1],
        "causal": is_causal,
        "logit_cap": logit_cap != 0.0,
        "page_size": kv_cache.shape[1],
    }


@mla_extend_with_kvcache.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from latent_samples(make, dtype, decode=False)


@mla_extend_with_kvcache.cost
def _(q: Tensor, kv_cache: Tensor, page_table: Tensor, max_seqlen_k: int, kv_lora_rank: int) -> Cost:
    return paged_cost(q, page_table.shape[0], max_seqlen_k, token_bytes(kv_cache), kv_lora_rank)
