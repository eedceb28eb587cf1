"""layernorm through torch.nn.functional.layer_norm: one fused kernel on every device torch has one for."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return why this call does not fit, or None."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype != x.dtype:
            return f"{name} is {parameter.dtype}, x is {x.dtype}: torch wants them alike"
    return None


@register_kernel(
    "norm",
    "layernorm",
    capability=ANY,
    signatures=formats(x=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=True,
)
def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Call F.layer_norm."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()
