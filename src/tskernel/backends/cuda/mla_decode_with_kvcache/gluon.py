"""mla_decode_with_kvcache on Hopper in Gluon: warp-specialised, its work shared out on the device."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.cuda import _mla_launch as latent
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default

COMPILE_PARTS: Final = ("sm90",)


def rejects(q: Tensor, kv_cache: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return latent.unsuitable(q, kv_cache)


@register_kernel(
    "attention",
    "mla_decode_with_kvcache",
    capability=latent.CAPABILITY,
    signatures=latent.SIGNATURES,
    traits=latent.TRAITS,
    priority=Priority.SPECIALIZED + 1,
    rejects=rejects,
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
    """Launch one program per multiprocessor, then the join."""
    scale = scale_or_default(softmax_scale, qk_nope_head_dim + q.shape[-1] - kv_lora_rank)
    latent.attend(q, kv_cache, page_table, cache_seqlens, out, lse, scale)


def compile_cases(chip: object) -> list[CompileCase]:
    """Return what cross-compilation tests build."""
    return [
        latent.decode_case("page 64", page=64),
        latent.decode_case("16 rows, page 64", page=64, height=16),
        latent.decode_case("32 rows, page 64", page=64, height=32),
        latent.decode_case("16 rows, page 16, 1 request, no lse", page=16, height=16, batch=1, lse=False),
        latent.decode_case("page 16, 1000 requests", page=16, batch=1000),
        latent.decode_case("page 128, no lse", page=128, lse=False),
        latent.join_case("join of many parts", batch=1, rows=128),
        latent.join_case("join of few parts", batch=16, rows=128),
        latent.join_case("join of many rows", batch=64, rows=256),
        latent.join_case("join of 8 parts", batch=8, rows=128),
        latent.join_case("join of few rows", batch=64, rows=16),
    ]
