"""mha_prefill: attention of packed sequences, queries against keys given beside them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.checks import empty, expect_shape, wide
from tskernel.library import Cost, Make, Sample, op
from tskernel.ops.attention import _checks as checks
from tskernel.ops.attention._cost import ragged_cost
from tskernel.ops.attention._layout import Ragged
from tskernel.ops.attention._reference import output_dtype, ragged_attention, scale_or_default
from tskernel.ops.attention._samples import prefill_samples


@op(
    out=True,
    lse=True,
    roles={"q": "q", "kv": "k"},
    dynamic=("max_seqlen", "max_seqlen_kv"),
    traits={
        "head_dim": 128,
        "head_dim_v": 128,
        "causal": True,
        "window": False,
        "logit_cap": False,
        "sinks": False,
        "scaled_kv": False,
        "gqa_ratio": 8,
        "same_lengths": True,
    },
    shard={
        "heads": {
            "q": 1,
            "k": 1,
            "v": 1,
            "sinks": 0,
            "q_scale": 0,
            "k_scale": 0,
            "v_scale": 0,
            "return": 1,
            "lse": 1,
        },
    },
    autocast=("q", "k", "v"),
)
def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_kv: int | None = None,
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
    """Softmax attention within each of several packed sequences.

    Sequence b owns query rows ``cu_seqlens[b]`` to ``cu_seqlens[b+1]``, and the same rows of k and v unless
    ``cu_seqlens_kv`` says otherwise. Sequences may be empty. The last query stands at the last key: causal query i
    sees keys ``j <= i + (k_len - q_len)``; with ``window_left = w >= 0`` it sees its own position and the w keys
    before it, whether or not ``is_causal`` is set (a Hugging Face window of W is ``w = W - 1``). Scores are scaled,
    capped (``cap * tanh(s / cap)``, 0 = off), masked, then normalized; ``sinks`` adds ``exp(sink)`` per head to the
    denominator only. A row that sees no key, or that belongs to no sequence, is 0 with LSE -inf.

    Shapes: ``q [Tq, Hq, D]``, ``k [Tk, Hkv, D]``, ``v [Tk, Hkv, Dv]`` (any strides), ``cu_seqlens, cu_seqlens_kv
    [B+1]`` from 0, ``sinks [Hq]``, ``q_scale`` one element or ``[Hq]``, ``k_scale, v_scale`` one element or ``[Hkv]``
    -> ``[Tq, Hq, Dv]``; LSE ``[Tq, Hq]``. Hq is a multiple of Hkv; query head h reads KV head ``h // (Hq // Hkv)``.
    ``max_seqlen, max_seqlen_kv`` bound the lengths from above.
    Dtypes: q, k, v alike in fp32, fp16 or bf16, or k and v fp8, or all fp8 (then the result is bf16); offsets int32;
    scales fp32 (value = stored * scale); sinks fp32 or bf16. LSE is fp32, the natural log over scaled and capped
    scores without the sink.
    Raises: ValueError for shapes, dtypes or head counts that do not go together, a negative cap, ``window_left <
    -1``.
    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; grouped heads, Ainslie et al. 2023,
    https://arxiv.org/abs/2305.13245; sinks as in GPT-OSS, after Xiao et al. 2023, https://arxiv.org/abs/2309.17453.
    """
    key_offsets = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
    if max_seqlen_kv is None:
        max_seqlen_kv = max_seqlen if cu_seqlens_kv is None else k.shape[0]
    out, lse = ragged_attention(
        q,
        k,
        v,
        Ragged(cu_seqlens, q.shape[0], max_seqlen),
        Ragged(key_offsets, k.shape[0], max_seqlen_kv),
        is_causal=is_causal,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        window_left=window_left,
        logit_cap=logit_cap,
        sinks=sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return (out, lse) if return_lse else out


@mha_prefill.check
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_kv: Tensor | None,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    checks.check_ragged(q, k, v)
    checks.check_offsets("cu_seqlens", cu_seqlens)
    checks.check_offsets("cu_seqlens_kv", cu_seqlens_kv)
    expect_shape("cu_seqlens_kv", cu_seqlens_kv, (cu_seqlens.shape[0],))
    checks.check_scores(q.shape[1], logit_cap=logit_cap, window_left=window_left, sinks=sinks)
    checks.check_scale("q_scale", q_scale, q.shape[1])
    checks.check_scale("k_scale", k_scale, k.shape[1])
    checks.check_scale("v_scale", v_scale, k.shape[1])


@mha_prefill.fake
def _(q: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    out = empty((q.shape[0], q.shape[1], v.shape[2]), q, output_dtype(q))
    return (out, empty(q.shape[:2], q, wide(q))) if return_lse else out


@mha_prefill.trait_values
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_kv: Tensor | None,
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
        k,
        v,
        causal=is_causal,
        window_left=window_left,
        logit_cap=logit_cap,
        sinks=sinks,
        scales=(q_scale, k_scale, v_scale),
    )
    return {**common, "same_lengths": cu_seqlens_kv is None}


@mha_prefill.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from prefill_samples(make, dtype)


@mha_prefill.cost
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, is_causal: bool) -> Cost:
    return ragged_cost(q, k, v, cu_seqlens.shape[0] - 1, is_causal)
