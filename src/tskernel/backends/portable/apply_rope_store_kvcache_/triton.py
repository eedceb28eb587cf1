"""apply_rope_store_kvcache_ in Triton: one launch rotates, and fills the cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _rope_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel


@register_kernel(
    "embedding",
    "apply_rope_store_kvcache_",
    capability=host.CAPABILITY,
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def apply_rope_store_kvcache_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    is_neox: bool = True,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Launch the rotation of blocks of heads, and the copies."""
    device.rope_store(positions, q, k, v, cos_sin_cache, k_cache, v_cache, slot_mapping, is_neox, k_scale, v_scale)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.store_case(chip, "bf16, part of the head", "float", rotary=64),
        device.store_case(chip, "fp8", "e4m3fn", rotary=128),
    ]
