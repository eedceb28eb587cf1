"""mha_decode_with_kvcache in Triton: flash-decoding, the queries of a KV head in one tile, keys cut into parts."""

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
    "mha_decode_with_kvcache",
    capability=flash.CAPABILITY,
    signatures=flash.SIGNATURES,
    traits=flash.MHA_TRAITS,
    priority=Priority.PERFORMANT,
    rejects=rejects,
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
        causal=True,
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
    inductor = flash.case(chip, "numbers in double, from Inductor", page=64, group=8, width=128, rows=8)
    inductor.signature.update(scale="fp64", cap="fp64")
    return [
        flash.case(chip, "one row of one head", page=1, rows=1, group=1, width=40, splits=2, ones=True),
        flash.case(chip, "page 64, parts", page=64, group=8, width=128, rows=8, splits=8),
        flash.case(chip, "fp8 KV, page 16, window", page=16, group=8, width=64, rows=8, kv="fp8e4nv", WINDOW=True),
        flash.case(chip, "fp8 KV, page 64", page=64, group=8, width=128, rows=8, kv="fp8e5", CAUSAL=False),
        flash.case(chip, "page 64, dealt", page=64, group=8, width=128, rows=8, batch=64, CAUSAL=False),
        flash.case(chip, "page 64, dealt parts", page=64, group=8, width=128, rows=8, batch=256, splits=2),
        inductor,
        flash.join_case(),
        flash.join_case(dealt=True),
    ]
