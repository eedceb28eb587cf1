"""mla_prefill by cuDNN."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.cuda import _cudnn as cudnn
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.attention._reference import scale_or_default


def rejects(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None) -> str | None:
    """Return why cuDNN cannot take the call, or None."""
    return cudnn.rejects(q, k, v, softmax_scale)


@register_kernel(
    "attention",
    "mla_prefill",
    capability=cudnn.CAPABILITY,
    signatures=cudnn.SIGNATURES,
    traits=cudnn.TRAITS,
    priority=Priority.PERFORMANT + 1,
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
    """Call cuDNN on packed sequences, each query head with its own KV head."""
    cudnn.ragged(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        scale=scale_or_default(softmax_scale, q.shape[-1]),
        causal=is_causal,
        out=out,
        lse=lse,
    )
