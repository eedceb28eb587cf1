"""store_mla_kvcache in Triton: latent and rope key in one launch, as keys and values of one head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _cache_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel

COMPILE_PARTS = ("gfx942",)  # another op compiles the program for all parts


@register_kernel(
    "kvcache", "store_mla_kvcache", capability=host.CAPABILITY, priority=Priority.PORTABLE + 2, traceable=True
)
def store_mla_kvcache(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scale: Tensor | None = None,
) -> None:
    """Launch the copies of rows."""
    rank = kv_c.shape[1]
    parts = kv_cache.narrow(-1, 0, rank), kv_cache.narrow(-1, rank, k_pe.shape[1])
    device.store(kv_c.unsqueeze(1), k_pe.unsqueeze(1), *parts, slot_mapping, scale, scale)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.case(chip, "512 and 64", 1, 512, 64, "e4m3fnuz", scaled=True),
    ]
