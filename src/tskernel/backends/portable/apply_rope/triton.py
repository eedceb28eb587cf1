"""apply_rope in Triton: queries and keys in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.backends.portable import _rope_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel

COMPILE_PARTS = ("gfx942",)  # another op compiles the program for all parts


@register_kernel("embedding", "apply_rope", capability=host.CAPABILITY, priority=Priority.PORTABLE + 2, traceable=True)
def apply_rope(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    is_neox: bool = True,
    head_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the rotation of blocks of heads."""
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    device.rope(positions, q, k, cos_sin_cache, q_out, k_out, is_neox, head_size)
    return q_out, k_out


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [device.case(chip, "pairs of neighbours", 64, 64, is_neox=False)]
