"""mla_decode_with_kvcache by FlashMLA, through its first interface or the one of 2025-09.

Read in FlashMLA 414a2f3 and 9241ae3 (flash_mla/flash_mla_interface.py, csrc/api/dense_decode.h). It plans on the
device, clears what it reads past a length, and gives rows without keys an LSE of +inf, which is put right here. It has
no ``out`` and no LSE layout to choose, so both are copied.

Source: https://github.com/deepseek-ai/FlashMLA.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.ops.attention._reference import scale_or_default

# The name on the package index belongs to a stale source package: the attribute tells a working one.
_CAPABILITY: Final = CapabilityRequirement(
    vendor="nvidia", exactly=("sm90",), packages=("flash_mla:flash_mla_with_kvcache",)
)


def rejects(q: Tensor, kv_cache: Tensor, softmax_scale: float | None) -> str | None:
    """Return why FlashMLA cannot take the call, or None."""
    if softmax_scale is not None and softmax_scale <= 0.0:
        return f"softmax_scale={softmax_scale}: the kernel takes the maximum before it scales"
    return rows.crooked(q=q, kv_cache=kv_cache)


@register_kernel(
    "attention",
    "mla_decode_with_kvcache",
    capability=_CAPABILITY,
    signatures=same_formats("q", "kv", dtypes=(torch.float16, torch.bfloat16)),
    traits={"kv_lora_rank": {512}, "rope_dim": {64}, "page_size": {64}, "logit_cap": {False}},
    priority=Priority.PERFORMANT + 1,
    rejects=rejects,
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
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Plan on the device, then attend."""
    import flash_mla  # pyright: ignore[reportMissingImports]

    if out.numel() == 0:
        return
    _, q_len, heads, width = q.shape
    if page_table.shape[1] == 0:
        return rows.without_keys(out, lse)
    lengths = cache_seqlens.contiguous()
    # The newer interface ignores what the older one plans with, and returns None for the second part.
    plan, parts = flash_mla.get_mla_metadata(lengths, q_len * heads, 1)
    result, found = flash_mla.flash_mla_with_kvcache(
        rows.aligned(q),
        rows.aligned(kv_cache),
        page_table if page_table.stride(-1) == 1 else page_table.contiguous(),
        lengths,
        kv_lora_rank,
        plan,
        parts,
        softmax_scale=scale_or_default(softmax_scale, qk_nope_head_dim + width - kv_lora_rank),
        causal=True,
    )
    out.copy_(result)
    if lse is not None:
        lse.copy_(torch.where(found == float("inf"), float("-inf"), found).transpose(1, 2))
    return None
