"""mha_prefill in Triton: flash attention over packed sequences."""

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
    "mha_prefill",
    capability=flash.CAPABILITY,
    signatures=flash.SIGNATURES,
    traits=flash.MHA_TRAITS,
    priority=Priority.PERFORMANT,
    rejects=rejects,
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
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Launch one tile of programs per block of queries, KV head and sequence."""
    attend_for(q)(
        q,
        k,
        v,
        out,
        lse,
        max_q=max_seqlen,
        max_k=max_seqlen if max_seqlen_kv is None else max_seqlen_kv,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        causal=is_causal,
        cu_q=cu_seqlens,
        cu_k=cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv,
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
        flash.case(chip, "one row of one head", rows=1, group=1, width=40, value_width=24, ones=True),
        flash.case(chip, "causal D 128", rows=4096, group=8, width=128),
        flash.case(chip, "D 64, sinks, window", rows=4096, group=8, width=64, SINKS=True, WINDOW=True),
        flash.case(chip, "D 256, cap", rows=4096, group=1, width=256, CAP=True, FUSED=False, AHEAD=False),
        flash.case(chip, "D 256, descriptors", rows=4096, group=1, width=256, AHEAD=True),
    ]
