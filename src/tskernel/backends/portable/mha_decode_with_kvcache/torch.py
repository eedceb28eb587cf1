"""mha_decode_with_kvcache through torch's scaled_dot_product_attention, on gathered pages."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable._sdpa import attend_grouped, gather_tokens, live_tokens
from tskernel.checks import FLOATS
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.ops.attention._layout import Paged, visible_keys
from tskernel.ops.attention._reference import scale_or_default


@register_kernel(
    "attention",
    "mha_decode_with_kvcache",
    capability=ANY,
    signatures=same_formats("q", "kv", dtypes=FLOATS),
    traits={"logit_cap": {False}, "sinks": {False}, "scaled_kv": {False}},
    priority=Priority.PORTABLE,
    traceable=True,
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
) -> Tensor:
    """Gather the pages, then let the query heads of a KV head share one read of its keys."""
    paged = Paged(page_table, cache_seqlens, k_cache, max_seqlen_k)
    seen = visible_keys(max_seqlen_q, cache_seqlens, max_seqlen_q, paged.longest, causal=True, window_left=window_left)
    first = cache_seqlens - (max_seqlen_q + window_left) if window_left >= 0 else 0
    tokens = live_tokens(paged, cache_seqlens, first)
    out = attend_grouped(
        q.unflatten(0, (paged.batch, max_seqlen_q)),
        gather_tokens(paged, k_cache, tokens),
        gather_tokens(paged, v_cache, tokens),
        seen,
        scale_or_default(softmax_scale, q.shape[-1]),
    )
    return out.flatten(0, 1).contiguous()
