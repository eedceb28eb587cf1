"""mha_extend_with_kvcache in Triton: flash attention over pages, cut along the keys where queries are few."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable import _attention_launch as flash
from tskernel.backends.portable._attention_traced import attend_for
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(k_cache: Tensor) -> str | None:
    """Return why this device cannot take the call, or None."""
    return flash.unreadable(k_cache)


@register_kernel(
    "attention",
    "mha_extend_with_kvcache",
    capability=flash.CAPABILITY,
    signatures=flash.SIGNATURES,
    traits=flash.MHA_TRAITS,
    priority=Priority.PERFORMANT,
    rejects=rejects,
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
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Launch the tiles and, where the keys were cut, the join."""
    attend_for(q)(
        q,
        k_cache,
        v_cache,
        out,
        lse,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        causal=is_causal,
        cu_q=cu_seqlens_q,
        table=page_table,
        lengths=cache_seqlens,
        window=window_left,
        cap=logit_cap,
        sinks=sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def compile_cases(chip: flash.Chip) -> list[flash.Case]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        flash.case(chip, "one row of one head", page=1, rows=1, group=1, width=8, splits=2, ones=True, RAGGED=True),
        flash.case(chip, "page 64", page=64, rows=512, group=8, width=128, RAGGED=True),
        flash.case(
            chip, "fp8 KV, page 16, parts", page=16, rows=32, group=8, width=128, kv="fp8e4nv", splits=4, RAGGED=True
        ),
    ]
