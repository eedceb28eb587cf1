"""mha_prefill by FlashAttention-3."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.cuda import _fa3 as fa3
from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(q: Tensor, k: Tensor, v: Tensor, logit_cap: float, softmax_scale: float | None) -> str | None:
    """Return why FlashAttention-3 cannot take the call, or None."""
    return fa3.rejects(q, v, logit_cap, softmax_scale) or rows.crooked(q=q, k=k, v=v)


@register_kernel(
    "attention",
    "mha_prefill",
    capability=fa3.CAPABILITY,
    signatures=fa3.SIGNATURES,
    traits={**fa3.TRAITS, "scaled_kv": {False}},
    priority=Priority.SPECIALIZED,
    rejects=rejects,
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
    """Call FlashAttention-3 on packed sequences."""
    cu_k = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
    max_k = max_seqlen_kv
    if max_k is None:
        max_k = max_seqlen if cu_seqlens_kv is None else k.shape[0]
    scale = scale_or_default(softmax_scale, q.shape[-1])
    scores = fa3.Scores(scale, is_causal, window_left, logit_cap, sinks)
    fa3.ragged(q, k, v, cu_seqlens, cu_k, max_seqlen, max_k, scores, out, lse)


COMPILE_PARTS = ("sm90", "sm100")


def compile_cases(chip: Any) -> list[CompileCase]:
    """Return what cross-compilation tests build: the programs around a vendor's."""
    return rows.compile_cases()
