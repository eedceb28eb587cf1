"""mla_decode_with_kvcache in Triton: all heads read one latent row per token, once; keys cut into parts."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable import _attention_launch as flash
from tskernel.backends.portable._attention_traced import attend_for, same_start
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(kv_cache: Tensor) -> str | None:
    """Return why this device cannot take the call, or None."""
    return flash.unreadable(kv_cache)


@register_kernel(
    "attention",
    "mla_decode_with_kvcache",
    capability=flash.CAPABILITY,
    signatures=flash.SIGNATURES,
    traits={"kv_lora_rank": range(1, 513), "rope_dim": range(257)},
    priority=Priority.PERFORMANT,
    rejects=rejects,
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
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Launch the tiles and, where the keys were cut, the join."""
    flat, flat_lse = out.flatten(0, 1), None if lse is None else lse.flatten(0, 1)
    rank = kv_lora_rank
    attend_for(q)(
        q.flatten(0, 1),
        kv_cache,
        kv_cache.narrow(-1, 0, rank),
        flat,
        flat_lse,
        max_q=q.shape[1],
        max_k=max_seqlen_k,
        scale=scale_or_default(softmax_scale, qk_nope_head_dim + q.shape[-1] - rank),
        causal=True,
        table=page_table,
        lengths=cache_seqlens,
        cap=logit_cap,
    )
    if not same_start(flat, out):  # a buffer whose requests are not evenly spaced rows
        out.copy_(flat.view(out.shape))


def compile_cases(chip: flash.Chip) -> list[flash.Case]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        flash.case(chip, "512 + 64", page=64, rows=128, group=128, width=576, value_width=512, splits=4, SHARED_V=True),
        flash.case(chip, "512 + 64, 16 heads", page=64, rows=16, group=16, width=576, value_width=512, SHARED_V=True),
    ]
