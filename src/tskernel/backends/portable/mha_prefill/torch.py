"""mha_prefill through torch's scaled_dot_product_attention, on padded sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable._sdpa import attend, attend_causal
from tskernel.checks import FLOATS
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.ops.attention._layout import Ragged, visible_keys
from tskernel.ops.attention._reference import scale_or_default


@register_kernel(
    "attention",
    "mha_prefill",
    capability=ANY,
    signatures=same_formats("q", "kv", dtypes=FLOATS),
    traits={"logit_cap": {False}, "sinks": {False}, "scaled_kv": {False}},
    priority=Priority.PORTABLE,
    traceable=True,
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
) -> Tensor:
    """Pad, attend and pack again; equal lengths under a plain causal mask need no mask tensor."""
    scale = scale_or_default(softmax_scale, q.shape[-1])
    queries = Ragged(cu_seqlens, q.shape[0], max_seqlen)
    if cu_seqlens_kv is None and max_seqlen_kv is None:
        max_seqlen_kv = max_seqlen
    keys = Ragged(
        cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv,
        k.shape[0],
        k.shape[0] if max_seqlen_kv is None else max_seqlen_kv,
    )
    padded = queries.pad(q), keys.pad(k), keys.pad(v)
    if cu_seqlens_kv is None and is_causal and window_left < 0:
        # Padding follows the last row of a sequence, so no row of a sequence looks at it.
        return queries.unpad(attend_causal(*padded, scale), 0.0)
    seen = visible_keys(
        queries.lengths, keys.lengths, queries.longest, keys.longest, causal=is_causal, window_left=window_left
    )
    if window_left >= 0:  # keys before every window may hold anything
        used = seen.any(1)[..., None, None]
        padded = padded[0], torch.where(used, padded[1], 0), torch.where(used, padded[2], 0)
    return queries.unpad(attend(*padded, seen, scale), 0.0)
