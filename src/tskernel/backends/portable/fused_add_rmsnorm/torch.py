"""fused_add_rmsnorm through torch.nn.functional.rms_norm: an in-place add, a fused norm and a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor, weight: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return None if weight.dtype == x.dtype else f"weight is {weight.dtype}, x is {x.dtype}: torch would not fuse it"


@register_kernel(
    "norm",
    "fused_add_rmsnorm",
    capability=ANY,
    signatures=formats(x=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=True,
)
def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Add in place, which torch does in fp32 with one rounding, then copy the result of F.rms_norm."""
    residual.add_(x)
    x.copy_(torch.nn.functional.rms_norm(residual, x.shape[-1:], weight, eps))
