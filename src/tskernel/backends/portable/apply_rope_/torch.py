"""apply_rope_ in torch operations: fused multiply-adds, and the results written where they belong."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable.apply_rope._rotate import rotate_into
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.embedding._rope import as_heads, cos_sin


@register_kernel("embedding", "apply_rope_", capability=ANY, priority=Priority.PORTABLE, traceable=True)
def apply_rope_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    is_neox: bool = True,
    head_size: int | None = None,
) -> None:
    """Rotate the leading channels in place."""
    cos, sin = cos_sin(positions, cos_sin_cache, torch.float32)
    for x in (as_heads(q, head_size), as_heads(k, head_size)):
        rotate_into(x, x, cos, sin, is_neox)
