"""mha_extend_with_kvcache through torch's scaled_dot_product_attention, on padded queries and gathered pages."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable._sdpa import attend, attend_grouped, gather_tokens, live_tokens
from tskernel.checks import FLOATS
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.ops.attention._layout import Paged, Ragged, visible_keys
from tskernel.ops.attention._reference import scale_or_default


@register_kernel(
    "attention",
    "mha_extend_with_kvcache",
    capability=ANY,
    signatures=same_formats("q", "kv", dtypes=FLOATS),
    traits={"logit_cap": {False}, "sinks": {False}, "scaled_kv": {False}},
    priority=Priority.PORTABLE,
    traceable=True,
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
) -> Tensor:
    """Pad the queries, gather the pages, attend under a mask, and pack the rows again."""
    queries = Ragged(cu_seqlens_q, q.shape[0], max_seqlen_q)
    paged = Paged(page_table, cache_seqlens, k_cache, max_seqlen_k)
    seen = visible_keys(
        queries.lengths, cache_seqlens, queries.longest, paged.longest, causal=is_causal, window_left=window_left
    )
    first = cache_seqlens - queries.lengths - window_left if window_left >= 0 else 0
    tokens = live_tokens(paged, cache_seqlens, first)
    # Only a plain int is looked at: a symbolic bound must not become a guard.
    few = isinstance(max_seqlen_q, int) and max_seqlen_q <= 4
    out = (attend_grouped if few else attend)(
        queries.pad(q),
        gather_tokens(paged, k_cache, tokens),
        gather_tokens(paged, v_cache, tokens),
        seen,
        scale_or_default(softmax_scale, q.shape[-1]),
    )
    return queries.unpad(out, 0.0)
