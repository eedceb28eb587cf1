"""mla_prefill through torch's scaled_dot_product_attention, on padded sequences."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable._sdpa import attend
from tskernel.checks import FLOATS
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.ops.attention._layout import Ragged, visible_keys
from tskernel.ops.attention._reference import scale_or_default


@register_kernel(
    "attention",
    "mla_prefill",
    capability=ANY,
    signatures=same_formats("q", "kv", dtypes=FLOATS),
    traits={"logit_cap": {False}},
    priority=Priority.PORTABLE,
    traceable=True,
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
) -> Tensor:
    """Pad, attend under a mask, and pack the rows again."""
    queries = Ragged(cu_seqlens_q, q.shape[0], max_seqlen_q)
    keys = Ragged(cu_seqlens_kv, k.shape[0], max_seqlen_kv)
    seen = visible_keys(queries.lengths, keys.lengths, queries.longest, keys.longest, causal=is_causal)
    out = attend(queries.pad(q), keys.pad(k), keys.pad(v), seen, scale_or_default(softmax_scale, q.shape[-1]))
    return queries.unpad(out, 0.0)
