"""mha_prefill by FlashAttention-4."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.cuda import _fa4 as fa4
from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None) -> str | None:
    """Return why FlashAttention-4 cannot take the call, or None."""
    return fa4.rejects(q, v, softmax_scale) or rows.crooked(q=q, k=k, v=v)


@register_kernel(
    "attention",
    "mha_prefill",
    capability=fa4.CAPABILITY,
    signatures=fa4.SIGNATURES,
    traits={**fa4.TRAITS, "scaled_kv": {False}},
    priority=Priority.SPECIALIZED,
    priorities=[({"head_dim": range(129, 257)}, Priority.SPECIALIZED + 2)],  # as measured on an H200
    rejects=rejects,
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
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Call FlashAttention-4 on packed sequences."""
    cu_k = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
    max_k = max_seqlen_kv
    if max_k is None:
        max_k = max_seqlen if cu_seqlens_kv is None else k.shape[0]
    fa4.ragged(
        q,
        k,
        v,
        cu_seqlens,
        cu_k,
        max_seqlen,
        max_k,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        causal=is_causal,
        window=window_left,
        cap=logit_cap,
        sinks=sinks,
        out=out,
        lse=lse,
    )
