"""qk_rmsnorm through torch.nn.functional.rms_norm: one fused kernel for q and one for k."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats


def rejects(q: Tensor, q_weight: Tensor, k_weight: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.dtype != q.dtype:
            return f"{name} is {weight.dtype}, q is {q.dtype}: torch would not fuse it"
    return None


@register_kernel(
    "norm",
    "qk_rmsnorm",
    capability=ANY,
    signatures=same_formats("q", "k", dtypes=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=True,
)
def qk_rmsnorm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Call F.rms_norm twice."""
    q_out = torch.nn.functional.rms_norm(q, q.shape[-1:], q_weight, eps)
    k_out = torch.nn.functional.rms_norm(k, k.shape[-1:], k_weight, eps)
    return q_out.contiguous(), k_out.contiguous()
