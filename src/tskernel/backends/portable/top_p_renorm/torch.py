"""top_p_renorm by radix selection: two histograms instead of a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats
from tskernel.ops.sampling._filters import clean_probs, normalized
from tskernel.ops.sampling._radix import keep_largest, ordered_keys


@register_kernel(
    "sampling",
    "top_p_renorm",
    capability=CapabilityRequirement(vendor="cpu"),  # a GPU's histogram is a storm of atomics on few bins
    signatures=formats(probs=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    traceable=True,
)
def top_p_renorm(probs: Tensor, top_p: Tensor) -> Tensor:
    """Add up mass from the largest probability down until it reaches the nucleus."""
    x = clean_probs(probs, torch.float32)
    weights, p = x.to(torch.float64), top_p.to(torch.float64).unsqueeze(1)
    keep = keep_largest(ordered_keys(x), weights, p * weights.sum(1, keepdim=True)) | (p >= 1)
    return normalized(x, keep).to(probs.dtype).contiguous()
