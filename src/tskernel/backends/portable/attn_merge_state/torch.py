"""attn_merge_state as one interpolation: the weight of a part is the sigmoid of the difference of the LSEs."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel


@register_kernel("attention", "attn_merge_state", capability=ANY, priority=Priority.PORTABLE, traceable=True)
def attn_merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Interpolate; ``lerp`` is exact at both ends, which keeps the identity exact."""
    no_a, no_b = lse_a == float("-inf"), lse_b == float("-inf")
    weight = torch.sigmoid(lse_b - lse_a).masked_fill(no_a & no_b, 0).unsqueeze(-1)
    a = out_a.float().masked_fill(no_a.unsqueeze(-1), 0)
    b = out_b.float().masked_fill(no_b.unsqueeze(-1), 0)
    return torch.lerp(a, b, weight).to(out_a.dtype).contiguous(), torch.logaddexp(lse_a, lse_b).contiguous()
