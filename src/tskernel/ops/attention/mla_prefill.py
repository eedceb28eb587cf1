"""mla_prefill: multi-head latent attention with keys and values expanded per head."""

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
from tskernel.ops.attention._samples import mla_prefill_samples


@op(
    out=True,
    lse=True,
    roles={"q": "q", "kv": "k"},
    dynamic=("max_seqlen_q", "max_seqlen_kv"),
    traits={"head_dim": 192, "head_dim_v": 128, "num_heads": 128, "causal": True, "logit_cap": False},
    shard={"heads": {"q": 1, "k": 1, "v": 1, "return": 1, "lse": 1}},
    autocast=("q", "k", "v"),
)
def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    logit_cap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention within each of several packed sequences, one KV head per query head, keys wider than values.

    Sequence b owns query rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b+1]`` and key rows likewise; either may be none.
    Causal query i sees keys ``j <= i + (k_len - q_len)``. Scores are scaled, capped (``cap * tanh(s / cap)``, 0 =
    off), masked, normalized. A row that sees no key, or that belongs to no sequence, is 0 with LSE -inf; partial
    results (a prefix cut in chunks) are joined by ``attn_merge_state``.

    Shapes: ``q [Tq, H, D]``, ``k [Tk, H, D]``, ``v [Tk, H, Dv]`` (any strides; D is 192 = 128 + 64 rotary and Dv 128
    in DeepSeek-V3), offsets ``[B+1]`` from 0 -> ``[Tq, H, Dv]``; LSE ``[Tq, H]``. ``max_seqlen_q, max_seqlen_kv``
    bound the lengths.
    Dtypes: q, k, v alike in fp32, fp16 or bf16, or k and v fp8, or all fp8 (then the result is bf16), fp8 taken at
    scale 1; offsets int32. LSE is fp32, the natural log over scaled and capped scores. The default scale is
    1/sqrt(D).
    Raises: ValueError for shapes, dtypes or head counts that do not go together, a negative cap.
    Source: DeepSeek-AI 2024 (DeepSeek-V2), https://arxiv.org/abs/2405.04434.
    """
    out, lse = ragged_attention(
        q,
        k,
        v,
        Ragged(cu_seqlens_q, q.shape[0], max_seqlen_q),
        Ragged(cu_seqlens_kv, k.shape[0], max_seqlen_kv),
        is_causal=is_causal,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        logit_cap=logit_cap,
    )
    return (out, lse) if return_lse else out


@mla_prefill.check
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, logit_cap: float) -> None:
    checks.check_ragged(q, k, v)
    expect_shape("k", k, (None, q.shape[1], None))
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q)
    checks.check_offsets("cu_seqlens_kv", cu_seqlens_kv)
    expect_shape("cu_seqlens_kv", cu_seqlens_kv, (cu_seqlens_q.shape[0],))
    checks.check_scores(q.shape[1], logit_cap=logit_cap)


@mla_prefill.fake
def _(q: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    out = empty((q.shape[0], q.shape[1], v.shape[2]), q, output_dtype(q))
    return (out, empty(q.shape[:2], q, wide(q))) if return_lse else out


@mla_prefill.trait_values
def _(q: Tensor, v: Tensor, is_causal: bool, logit_cap: float) -> dict[str, object]:
    return {
        "head_dim": q.shape[2],
        "head_dim_v": v.shape[2],
        "num_heads": q.shape[1],
        "causal": is_causal,
        "logit_cap": logit_cap != 0.0,
    }


@mla_prefill.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from mla_prefill_samples(make, dtype)


@mla_prefill.cost
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, is_causal: bool) -> Cost:
    return ragged_cost(q, k, v, cu_seqlens_q.shape[0] - 1, is_causal)
