"""store_kvcache in C++: one launch for keys and values."""

from __future__ import annotations

from torch import Tensor

from tskernel._torch.binding import calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel


def rejects(slot_mapping: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(slot_mapping=slot_mapping)


@register_kernel(
    "kvcache",
    "store_kvcache",
    capability=lib.CAPABILITY,
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls("tskernel_native::store_kvcache", "k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale")
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
    """Launch the kernel of csrc/store_kvcache.cu."""
    lib.native("store_kvcache")(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
