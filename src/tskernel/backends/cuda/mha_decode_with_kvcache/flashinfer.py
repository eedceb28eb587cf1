"""mha_decode_with_kvcache by FlashInfer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.cuda import _flashinfer as flashinfer
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(q: Tensor, k_cache: Tensor, v_cache: Tensor, softmax_scale: float | None) -> str | None:
    """Return why FlashInfer cannot take the call, or None."""
    return flashinfer.rejects(q, k_cache, v_cache, softmax_scale)


@register_kernel(
    "attention",
    "mha_decode_with_kvcache",
    capability=flashinfer.CAPABILITY,
    signatures=flashinfer.SIGNATURES,
    traits=flashinfer.TRAITS,
    # Below the portable kernel, which cuts long rows.
    priority=Priority.PORTABLE + 2,
    rejects=rejects,
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
) -> None:
    """Call FlashInfer with a plan that does not depend on lengths. Its LSE has three good digits: it is not offered."""
    kind = flashinfer.Kind(
        q.device,
        q.dtype,
        page_table.shape[0],
        max_seqlen_q,
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        k_cache.shape[1],
        scale_or_default(softmax_scale, q.shape[2]),
        window_left,
        logit_cap,
    )
    flashinfer.decode(q, k_cache, v_cache, page_table, cache_seqlens, kind, sinks, out)


COMPILE_PARTS = ("sm80", "sm90")


def compile_cases(chip: Any) -> list[CompileCase]:
    """Return what cross-compilation tests build: the programs around FlashInfer's."""
    return flashinfer.compile_cases()
