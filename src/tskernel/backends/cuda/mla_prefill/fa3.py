"""mla_prefill by FlashAttention-3."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.cuda import _fa3 as fa3
from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(q: Tensor, k: Tensor, v: Tensor, logit_cap: float, softmax_scale: float | None) -> str | None:
    """Return why FlashAttention-3 cannot take the call, or None."""
    return fa3.rejects(q, v, logit_cap, softmax_scale) or rows.crooked(q=q, k=k, v=v)


@register_kernel(
    "attention",
    "mla_prefill",
    capability=fa3.CAPABILITY,
    signatures=fa3.SIGNATURES,
    traits=fa3.TRAITS,
    priority=Priority.SPECIALIZED,
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
    """Call FlashAttention-3 on packed sequences, each query head with its own KV head."""
    scores = fa3.Scores(scale_or_default(softmax_scale, q.shape[-1]), is_causal, -1, logit_cap, None)
    fa3.ragged(q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, scores, out, lse)
