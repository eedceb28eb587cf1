"""mla_extend_with_kvcache in Triton: all heads read one latent row per token, once."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable import _attention_launch as flash
from tskernel.backends.portable._attention_traced import attend_for
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(kv_cache: Tensor) -> str | None:
    """Return why this device cannot take the call, or None."""
    return flash.unreadable(kv_cache)


@register_kernel(
    "attention",
    "mla_extend_with_kvcache",
    capability=flash.CAPABILITY,
    signatures=flash.SIGNATURES,
    traits={"kv_lora_rank": range(1, 513), "rope_dim": range(257)},
    priority=Priority.PERFORMANT,
    rejects=rejects,
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
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Launch the tiles and, where the keys were cut, the join."""
    rank = kv_lora_rank
    attend_for(q)(
        q,
        kv_cache,
        kv_cache.narrow(-1, 0, rank),
        out,
        lse,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        scale=scale_or_default(softmax_scale, qk_nope_head_dim + q.shape[-1] - rank),
        causal=is_causal,
        cu_q=cu_seqlens_q,
        table=page_table,
        lengths=cache_seqlens,
        cap=logit_cap,
    )


def compile_cases(chip: flash.Chip) -> list[flash.Case]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        flash.case(
            chip, "512 + 64", page=64, rows=2048, group=128, width=576, value_width=512, RAGGED=True, SHARED_V=True
        ),
    ]
