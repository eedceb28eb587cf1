"""mla_prefill in Triton: flash attention with keys wider than values."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable import _attention_launch as flash
from tskernel.backends.portable._attention_traced import attend_for
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(k: Tensor) -> str | None:
    """Return why this device cannot take the call, or None."""
    return flash.unreadable(k)


@register_kernel(
    "attention",
    "mla_prefill",
    capability=flash.CAPABILITY,
    signatures=flash.SIGNATURES,
    traits=flash.MHA_TRAITS,
    priority=Priority.PERFORMANT,
    rejects=rejects,
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
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Launch one tile of programs per block of queries, head and sequence."""
    attend_for(q)(
        q,
        k,
        v,
        out,
        lse,
        max_q=max_seqlen_q,
        max_k=max_seqlen_kv,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        causal=is_causal,
        cu_q=cu_seqlens_q,
        cu_k=cu_seqlens_kv,
        cap=logit_cap,
    )


def compile_cases(chip: flash.Chip) -> list[flash.Case]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        flash.case(chip, "192 and 128", rows=4096, group=1, width=192, value_width=128),
    ]
