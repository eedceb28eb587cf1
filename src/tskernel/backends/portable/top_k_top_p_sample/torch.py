"""top_k_top_p_sample by radix selection: the sets of the filters without a sort, then the race every kernel runs."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats
from tskernel.ops.sampling._filters import clean_logits, effective_top_k
from tskernel.ops.sampling._race import race_winner, scaled_logits
from tskernel.ops.sampling._radix import keep_largest, ordered_keys


@register_kernel(
    "sampling",
    "top_k_top_p_sample",
    capability=CapabilityRequirement(vendor="cpu"),  # a GPU's histogram is a storm of atomics on few bins
    signatures=formats(logits=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    traceable=True,
)
def top_k_top_p_sample(
    logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor
) -> Tensor:
    """Find the top-k set by counting and the top-p set by adding up mass, then draw."""
    x = clean_logits(logits, torch.float32)
    scaled, greedy = scaled_logits(x, temperature)
    keys = ordered_keys(x)
    k = effective_top_k(top_k, x.shape[1]).masked_fill(greedy, 1).to(torch.float64)
    in_k = keep_largest(keys, torch.ones_like(x, dtype=torch.float64), k)
    weights = scaled.exp().masked_fill(~in_k, 0.0).to(torch.float64)
    p = top_p.to(torch.float64).unsqueeze(1)
    in_p = keep_largest(keys, weights, p * weights.sum(1, keepdim=True)) | (p >= 1)
    return race_winner(scaled, in_k & in_p & (x > float("-inf")), seed, offset)
