"""apply_rope_ in Triton: queries and keys in one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _rope_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel

COMPILE_PARTS = ("gfx942",)  # another op compiles the program for all parts


@register_kernel("embedding", "apply_rope_", capability=host.CAPABILITY, priority=Priority.PORTABLE + 2, traceable=True)
def apply_rope_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    is_neox: bool = True,
    head_size: int | None = None,
) -> None:
    """Launch the rotation of blocks of heads."""
    device.rope(positions, q, k, cos_sin_cache, q, k, is_neox, head_size)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [device.case(chip, "halves", 128, 128, is_neox=True)]
