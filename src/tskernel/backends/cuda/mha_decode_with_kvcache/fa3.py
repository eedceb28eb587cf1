"""mha_decode_with_kvcache by FlashAttention-3."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.cuda import _fa3 as fa3
from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(q: Tensor, k_cache: Tensor, v_cache: Tensor, logit_cap: float, softmax_scale: float | None) -> str | None:
    """Return why FlashAttention-3 cannot take the call, or None."""
    why = fa3.rejects(q, v_cache, logit_cap, softmax_scale)
    return why or rows.crooked(q=q, k_cache=k_cache, v_cache=v_cache)


@register_kernel(
    "attention",
    "mha_decode_with_kvcache",
    capability=fa3.CAPABILITY,
    signatures=fa3.SIGNATURES,
    traits={**fa3.TRAITS, "scaled_kv": {False}},
    # Below the portable kernel, which reads the cache faster on every measured shape.
    priority=Priority.PORTABLE + 3,
    rejects=rejects,
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
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Call FlashAttention-3 on the last tokens of each request over a paged cache."""
    scale = scale_or_default(softmax_scale, q.shape[-1])
    scores = fa3.Scores(scale, True, window_left, logit_cap, sinks)
    pages = fa3.Pages(k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k)
    fa3.paged(q, pages, None, max_seqlen_q, scores, out, lse)
