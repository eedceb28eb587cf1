"""mla_prefill by FlashAttention-4."""

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
    "mla_prefill",
    capability=fa4.CAPABILITY,
    signatures=fa4.SIGNATURES,
    traits=fa4.TRAITS,
    priority=Priority.SPECIALIZED + 2,
    rejects=rejects,
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
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Call FlashAttention-4 on packed sequences, each query head with its own KV head."""
    fa4.ragged(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        causal=is_causal,
        cap=logit_cap,
        out=out,
        lse=lse,
    )
