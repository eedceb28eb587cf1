"""mla_prefill on Hopper in Gluon: warp-specialised flash attention over packed sequences."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.cuda import _flash_hopper as flash
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default

COMPILE_PARTS: Final = ("sm90",)


def rejects(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None) -> str | None:
    """Return why this call does not fit, or None."""
    return flash.unsuitable(q, k, v, (), softmax_scale)


@register_kernel(
    "attention",
    "mla_prefill",
    capability=flash.CAPABILITY,
    signatures=flash.SIGNATURES,
    traits={"head_dim": range(8, 257, 8), "head_dim_v": range(8, 257, 8)},
    priority=Priority.SPECIALIZED + 1,
    rejects=rejects,
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
    """Launch one persistent program per multiprocessor; each query head has its own KV head."""
    flash.attend(
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_k=max_seqlen_kv,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        causal=is_causal,
        cap=logit_cap,
    )


def compile_cases(chip: object) -> list[CompileCase]:
    """Return what cross-compilation tests build."""
    return [
        flash.case("D 192, values 128", 192, 1, value_width=128),
        flash.case("D 192, values 128, all keys, cap", 192, 1, value_width=128, CAUSAL=False, CAP=True),
    ]
