"""The clamped SwiGLU of GPT-OSS, shared by the plain op and its quantizing form."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.ops.activation._gated import gate_and_up


def clamped_swiglu(x: Tensor, dtype: torch.dtype, alpha: float, limit: float, interleaved: bool) -> Tensor:
    """Compute the activation in ``dtype`` and return it unrounded."""
    gate, up = (x[..., 0::2].to(dtype), x[..., 1::2].to(dtype)) if interleaved else gate_and_up(x, dtype)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1.0)
