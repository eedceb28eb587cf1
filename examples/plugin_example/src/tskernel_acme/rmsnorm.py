"""rmsnorm for acme devices. Written in torch here; a real plugin would launch the vendor's kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide each row by its root-mean-square and multiply by the weight, in fp32 with one rounding."""
    wide = x.float()
    scale = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + eps)
    return (wide * scale * weight.float()).to(x.dtype, memory_format=torch.contiguous_format)
