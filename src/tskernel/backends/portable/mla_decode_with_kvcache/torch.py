"""mla_decode_with_kvcache through torch's scaled_dot_product_attention, on gathered pages."""

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
    "mla_decode_with_kvcache",
    capability=ANY,
    signatures=same_formats("q", "kv", dtypes=FLOATS),
    traits={"logit_cap": {False}},
    priority=Priority.PORTABLE,
    traceable=True,
)
def mla_decode_with_kvcache(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    *,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    softmax_scale: float | None = None,
    logit_cap: float = 0.0,
) -> Tensor:
    """Gather the pages and let all heads share one read of them, with keys as values."""
    paged = Paged(page_table, cache_seqlens, kv_cache, max_seqlen_k)
    seen = visible_keys(q.shape[1], cache_seqlens, q.shape[1], paged.longest, causal=True)
    keys = gather_tokens(paged, kv_cache, live_tokens(paged, cache_seqlens, 0))
    scale = scale_or_default(softmax_scale, qk_nope_head_dim + q.shape[-1] - kv_lora_rank)
    # Whole rows serve as values too: cutting them first would copy them or leave the fused kernels.
    return attend_grouped(q, keys, keys, seen, scale)[..., :kv_lora_rank].contiguous()
