"""rmsnorm through torch.nn.functional.rms_norm: one fused kernel on every device torch has one for."""

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
    "rmsnorm",
    capability=ANY,
    signatures=formats(x=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=True,
)
def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Call F.rms_norm."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps).contiguous()
