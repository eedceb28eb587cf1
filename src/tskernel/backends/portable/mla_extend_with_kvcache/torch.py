"""mla_extend_with_kvcache through torch's scaled_dot_product_attention, on padded queries and gathered pages."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable._sdpa import attend_grouped, gather_tokens, live_tokens
from tskernel.checks import FLOATS
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.ops.attention._layout import Paged, Ragged, visible_keys
from tskernel.ops.attention._reference import scale_or_default


@register_kernel(
    "attention",
    "mla_extend_with_kvcache",
    capability=ANY,
    signatures=same_formats("q", "kv", dtypes=FLOATS),
    traits={"logit_cap": {False}},
    priority=Priority.PORTABLE,
    traceable=True,
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
) -> Tensor:
    """Pad the queries, gather the pages, attend under a mask with keys as values, and pack the latent part."""
    queries = Ragged(cu_seqlens_q, q.shape[0], max_seqlen_q)
    paged = Paged(page_table, cache_seqlens, kv_cache, max_seqlen_k)
    seen = visible_keys(queries.lengths, cache_seqlens, queries.longest, paged.longest, causal=is_causal)
    keys = gather_tokens(paged, kv_cache, live_tokens(paged, cache_seqlens, 0))
    scale = scale_or_default(softmax_scale, qk_nope_head_dim + q.shape[-1] - kv_lora_rank)
    # Whole rows serve as values too: cutting them first would copy them or leave the fused kernels.
    out = attend_grouped(queries.pad(q), keys, keys, seen, scale)[..., :kv_lora_rank]
    return queries.unpad(out, 0.0)
