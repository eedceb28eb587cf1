"""Sample calls of the attention ops: ragged lengths, paged caches and every option, all small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tskernel.library import Make, Sample

FP8 = torch.float8_e4m3fn


def offsets(make: Make, lengths: Sequence[int]) -> Tensor:
    """Return int32 row offsets of packed sequences."""
    return make.tensor([0, *accumulate(lengths)], torch.int32)


def page_table(make: Make, lengths: Sequence[int], page_size: int) -> tuple[Tensor, int]:
    """Return a shuffled table, -1 past each length, and the number of pages: one more than the table uses."""
    columns = max(1, *((n + page_size - 1) // page_size for n in lengths)) if lengths else 1
    used = [[c * page_size < n for c in range(columns)] for n in lengths]
    table = make.permutation(len(lengths) * columns).view(len(lengths), columns)
    mask = make.tensor(used, torch.bool).view(len(lengths), columns)
    return torch.where(mask, table, -1), len(lengths) * columns + 1


def mha_caches(
    make: Make, dtype: torch.dtype, pages: int, page_size: int, heads: int, width: int, value_width: int
) -> tuple[Tensor, Tensor]:
    """Return a K and a V cache that are interleaved views of one buffer, as vLLM lays them out."""
    both = make.randn((pages, page_size, heads, width + value_width), dtype)
    return both[..., :width], both[..., width:]


def prefill_samples(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield calls of mha_prefill."""

    def call(
        name: str,
        lengths: Sequence[int],
        heads: tuple[int, int] = (4, 2),
        width: int = 32,
        value_width: int | None = None,
        keys: Sequence[int] | None = None,
        spare: int = 0,
        kv_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Sample:
        k_rows = sum(lengths if keys is None else keys) + spare
        if keys is not None:
            options |= {"cu_seqlens_kv": offsets(make, keys), "max_seqlen_kv": max(keys)}
        return Sample(
            name,
            q=make.randn((sum(lengths) + spare, heads[0], width), dtype),
            k=make.randn((k_rows, heads[1], width), kv_dtype or dtype),
            v=make.randn((k_rows, heads[1], value_width or width), kv_dtype or dtype),
            cu_seqlens=offsets(make, lengths),
            max_seqlen=max(lengths, default=0),
            **options,
        )

    yield call("ordinary", [5, 3, 9])
    yield call("one", [1], heads=(1, 1), width=1)
    yield call("odd", [7, 0, 2], heads=(3, 1), width=40, value_width=24)
    yield call("no_sequence", [])
    yield call("empty", [0, 0])
    yield call("spare_rows", [2, 3], spare=3)
    yield call("full", [5, 3], keys=[2, 7], is_causal=False)
    yield call("causal_suffix", [5, 3, 2], keys=[2, 7, 0])
    yield call("window_cap", [9, 4], window_left=2, logit_cap=5.0, softmax_scale=0.3)
    yield call("sinks", [6, 1], sinks=make.randn((4,), torch.float32), window_left=3)
    one, per_head = make.full((1,), 0.5, torch.float32), make.tensor([0.5, 2.0], torch.float32)
    yield call("fp8_kv", [4, 3], kv_dtype=FP8, k_scale=one, v_scale=per_head)
    if dtype == torch.bfloat16:
        fp8 = call("fp8", [4, 3], kv_dtype=FP8, q_scale=one, k_scale=per_head, v_scale=one)
        yield Sample("fp8", **{**fp8.arguments, "q": fp8.arguments["q"].to(FP8)})
        yield call("wide", [5, 3], width=128)  # a width that libraries are made for
    qkv = make.randn((8, 8, 32), dtype)
    q, k, v = qkv.split([4, 2, 2], 1)
    yield Sample("fused_qkv", q=q, k=k, v=v, cu_seqlens=offsets(make, [5, 3]), max_seqlen=8)
    heads_first = {n: make.randn((h, 8, 32), dtype).transpose(0, 1) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    yield Sample("heads_first", **heads_first, cu_seqlens=offsets(make, [5, 3]), max_seqlen=100)


def _paged_call(
    name: str,
    make: Make,
    dtype: torch.dtype,
    lengths: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    width: int = 32,
    value_width: int | None = None,
    page_size: int = 4,
    kv_dtype: torch.dtype | None = None,
    queries: Sequence[int] | int = 1,
    **options: Any,
) -> Sample:
    """Return a decode call, or with a list of query lengths an extend call."""
    table, pages = page_table(make, lengths, page_size)
    k_cache, v_cache = mha_caches(make, kv_dtype or dtype, pages, page_size, heads[1], width, value_width or width)
    rows = len(lengths) * queries if isinstance(queries, int) else sum(queries)
    bounds: dict[str, Any] = {"max_seqlen_q": queries, "max_seqlen_k": max(lengths, default=0)}
    if not isinstance(queries, int):
        bounds |= {"max_seqlen_q": max(queries, default=0), "cu_seqlens_q": offsets(make, queries)}
    return Sample(
        name,
        q=make.randn((rows, heads[0], width), dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=table,
        cache_seqlens=make.tensor(list(lengths), torch.int32),
        **bounds,
        **options,
    )


def _with_options(make: Make, dtype: torch.dtype, queries: dict[int, Any]) -> Iterator[Sample]:
    """Yield paged calls with every option on; ``queries`` gives the query lengths for 1, 2 and 3 sequences."""

    def call(name: str, lengths: Sequence[int], **options: Any) -> Sample:
        return _paged_call(name, make, dtype, lengths, queries=queries[len(lengths)], **options)

    yield call("ordinary", [9, 4, 6])
    yield call("one", [1], heads=(1, 1), width=1, page_size=1)
    yield call("odd", [7, 0, 2], heads=(3, 1), width=40, value_width=24, page_size=3)
    yield call("window_cap", [9, 5], window_left=2, logit_cap=5.0, softmax_scale=0.3)
    yield call("sinks", [6, 1], sinks=make.randn((4,), torch.float32), window_left=3)
    one, per_head = make.full((1,), 0.5, torch.float32), make.tensor([0.5, 2.0], torch.float32)
    yield call("fp8_kv", [4, 3], kv_dtype=FP8, k_scale=one, v_scale=per_head)
    if dtype == torch.bfloat16:
        fp8 = call("fp8", [4, 3], kv_dtype=FP8, q_scale=one, k_scale=per_head, v_scale=one)
        yield Sample("fp8", **{**fp8.arguments, "q": fp8.arguments["q"].to(FP8)})
    wider = call("sliced_q", [5, 8], width=16)
    wider.arguments["q"] = make.randn((wider.arguments["q"].shape[0], 9, 20), dtype)[:, 3:7, 2:18]
    yield wider


def extend_samples(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield calls of mha_extend_with_kvcache."""
    yield from _with_options(make, dtype, {1: [1], 2: [3, 1], 3: [4, 2, 2]})
    yield _paged_call("full", make, dtype, [5, 8], queries=[2, 3], is_causal=False)
    yield _paged_call("more_queries_than_keys", make, dtype, [2, 5], queries=[5, 2])
    yield _paged_call("no_query", make, dtype, [2, 5], queries=[0, 0])
    yield _paged_call("no_sequence", make, dtype, [], queries=[])


def decode_samples(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield calls of mha_decode_with_kvcache."""
    yield from _with_options(make, dtype, dict.fromkeys((1, 2, 3), 1))
    yield _paged_call("verify", make, dtype, [9, 2, 5], queries=3)
    yield _paged_call("no_sequence", make, dtype, [])
    if dtype == torch.bfloat16:  # widths and pages that libraries are made for
        yield _paged_call("wide", make, dtype, [19, 3], width=64, page_size=16)


def mla_prefill_samples(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield calls of mla_prefill."""

    def call(
        name: str, lengths: Sequence[int], keys: Sequence[int], widths: tuple[int, int] = (48, 32), **options: Any
    ) -> Sample:
        return Sample(
            name,
            q=make.randn((sum(lengths), 3, widths[0]), dtype),
            k=make.randn((sum(keys), 3, widths[0]), dtype),
            v=make.randn((sum(keys), 3, widths[1]), dtype),
            cu_seqlens_q=offsets(make, lengths),
            cu_seqlens_kv=offsets(make, keys),
            max_seqlen_q=max(lengths, default=0),
            max_seqlen_kv=max(keys, default=0),
            **options,
        )

    yield call("ordinary", [5, 3], [5, 3])
    yield call("one", [1], [1])
    yield call("suffix", [4, 0, 3], [2, 3, 7], logit_cap=5.0)
    yield call("full", [4, 3], [2, 7], is_causal=False, softmax_scale=0.2)
    yield call("empty", [0], [0])
    padded = make.randn((8, 3, 64), dtype)
    width_padded = call("padded_width", [5, 3], [5, 3])
    width_padded.arguments |= {"q": padded[..., :48], "v": padded[..., 32:]}
    yield width_padded
    if dtype == torch.bfloat16:
        yield call("deepseek", [5, 3], [5, 3], widths=(192, 128))


def latent_samples(make: Make, dtype: torch.dtype, *, decode: bool) -> Iterator[Sample]:
    """Yield calls of mla_decode_with_kvcache, or of mla_extend_with_kvcache."""

    def call(
        name: str,
        queries: Sequence[int],
        lengths: Sequence[int],
        page_size: int = 4,
        rank: int = 32,
        rope: int = 16,
        **options: Any,
    ) -> Sample:
        table, pages = page_table(make, lengths, page_size)
        kv_dtype = options.pop("kv_dtype", dtype)
        most = max(queries, default=1)
        width = rank + rope
        shape = (len(queries), most, 3, width) if decode else (sum(queries), 3, width)
        if not decode:
            options |= {"cu_seqlens_q": offsets(make, queries), "max_seqlen_q": most}
        return Sample(
            name,
            q=make.randn(shape, dtype),
            kv_cache=make.randn((pages, page_size, 1, width), kv_dtype),
            page_table=table,
            cache_seqlens=make.tensor(list(lengths), torch.int32),
            max_seqlen_k=max(lengths, default=0),
            **{"kv_lora_rank": rank, "qk_nope_head_dim": 24, **options},
        )

    yield call("ordinary", [1, 1, 1] if decode else [2, 1, 3], [9, 4, 6])
    yield call("one", [1], [1], page_size=1)
    yield call("verify", [3, 3], [2, 9], logit_cap=5.0)
    yield call("no_key", [2, 2], [0, 5], softmax_scale=0.2)
    yield call("no_sequence", [], [])
    yield call("fp8_cache", [1, 1], [4, 7], kv_dtype=FP8)
    if dtype == torch.bfloat16:
        queries = [1, 1] if decode else [2, 1]
        yield call("deepseek", queries, [67, 3], page_size=64, rank=512, rope=64, qk_nope_head_dim=128)
    if not decode:
        yield call("ragged", [4, 0, 2], [6, 3, 2])
        yield call("full", [4, 2], [6, 5], is_causal=False)
