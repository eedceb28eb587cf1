"""gelu_tanh_and_mul in torch operations that keep the gate in fp32 and round once, straight into the result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


@register_kernel(
    "activation",
    "gelu_tanh_and_mul",
    capability=ANY,
    signatures=formats(x=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    traceable=True,
)
def gelu_tanh_and_mul(x: Tensor, *, out: Tensor) -> None:
    """Multiply the fp32 gate by up as it is: type promotion widens up and the product is rounded on the way out."""
    width = x.shape[-1] // 2
    torch.mul(F.gelu(x[..., :width].to(torch.float32), approximate="tanh"), x[..., width:], out=out)
