"""apply_rope in torch operations: fused multiply-adds, and the results written where they belong."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable.apply_rope._rotate import rotate_into
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.embedding._rope import as_heads, cos_sin


@register_kernel("embedding", "apply_rope", capability=ANY, priority=Priority.PORTABLE, traceable=True)
def apply_rope(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    is_neox: bool = True,
    head_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the leading channels and copy the others."""
    cos, sin = cos_sin(positions, cos_sin_cache, torch.float32)
    results = []
    for x in (q, k):
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        heads, source = as_heads(result, head_size), as_heads(x, head_size)
        rotate_into(heads, source, cos, sin, is_neox)
        heads[..., 2 * cos.shape[-1] :].copy_(source[..., 2 * cos.shape[-1] :])
        results.append(result)
    return results[0], results[1]
