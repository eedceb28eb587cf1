"""store_kvcache in Triton: keys and values in one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _cache_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel


@register_kernel("kvcache", "store_kvcache", capability=host.CAPABILITY, priority=Priority.PORTABLE + 2, traceable=True)
def store_kvcache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Launch the copies of rows."""
    device.store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.case(chip, "fp8, scales", 8, 128, 128, "e4m3fn", scaled=True),
        device.case(chip, "bf16", 8, 64, 64, "float", scaled=False),
    ]
