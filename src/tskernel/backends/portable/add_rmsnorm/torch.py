"""add_rmsnorm through torch.nn.functional.rms_norm: two kernels on every device torch has a fused norm for."""

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
    "add_rmsnorm",
    capability=ANY,
    signatures=formats(x=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=True,
)
def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add, which torch does in fp32 with one rounding, then call F.rms_norm."""
    total = (x + residual).contiguous()
    return torch.nn.functional.rms_norm(total, x.shape[-1:], weight, eps), total
