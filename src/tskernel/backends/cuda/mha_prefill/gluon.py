"""mha_prefill on Hopper in Gluon: warp-specialised flash attention over packed sequences."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.cuda import _flash_hopper as flash
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default

COMPILE_PARTS: Final = ("sm90",)
SHORT: Final = flash.choose_config(flash.Shape(64, 64, 8, True, False), 1)


def rejects(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> str | None:
    """Return why this call does not fit, or None."""
    return flash.unsuitable(q, k, v, (q_scale, k_scale, v_scale), softmax_scale)


@register_kernel(
    "attention",
    "mha_prefill",
    capability=flash.CAPABILITY,
    signatures=flash.SIGNATURES,
    traits={"head_dim": range(8, 257, 8), "head_dim_v": range(8, 257, 8)},
    priority=Priority.SPECIALIZED + 1,
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
    """Launch one persistent program per multiprocessor."""
    flash.attend(
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv,
        max_k=max_seqlen if max_seqlen_kv is None else max_seqlen_kv,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        causal=is_causal,
        window=window_left,
        cap=logit_cap,
        sinks=sinks,
    )


def compile_cases(chip: object) -> list[CompileCase]:
    """Return what cross-compilation tests build."""
    return [
        flash.case("odd width, group of 5", 40, 5, CAUSAL=False),
        flash.case("D 128", 128, 8),
        flash.case("D 64, sinks", 64, 8, SINKS=True),
        flash.case("D 64, sinks, window", 64, 8, SINKS=True, WINDOW=True),
        flash.case("D 128, window, cap", 128, 4, WINDOW=True, CAP=True),
        flash.case("D 256", 256, 1),
        flash.case("D 192, values 128", 192, 1, value_width=128),
        flash.case("D 64, short sequences", 64, 8, SHORT),
    ]
