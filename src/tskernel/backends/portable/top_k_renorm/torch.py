"""top_k_renorm by radix selection: two histograms instead of a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats
from tskernel.ops.sampling._filters import clean_probs, effective_top_k, normalized
from tskernel.ops.sampling._radix import keep_largest, ordered_keys


@register_kernel(
    "sampling",
    "top_k_renorm",
    capability=CapabilityRequirement(vendor="cpu"),  # a GPU's histogram is a storm of atomics on few bins
    signatures=formats(probs=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    traceable=True,
)
def top_k_renorm(probs: Tensor, top_k: Tensor) -> Tensor:
    """Count elements from the largest value down until there are k."""
    x = clean_probs(probs, torch.float32)
    k = effective_top_k(top_k, x.shape[1]).to(torch.float64)
    keep = keep_largest(ordered_keys(x), torch.ones_like(x, dtype=torch.float64), k)
    return normalized(x, keep).to(probs.dtype).contiguous()
