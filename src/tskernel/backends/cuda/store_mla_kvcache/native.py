"""store_mla_kvcache in C++: one launch for the latent and the rope key."""

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
    "store_mla_kvcache",
    capability=lib.CAPABILITY,
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls("tskernel_native::store_mla_kvcache", "kv_c", "k_pe", "kv_cache", "slot_mapping", "scale")
def store_mla_kvcache(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scale: Tensor | None = None,
) -> None:
    """Launch the kernel of csrc/store_kvcache.cu."""
    lib.native("store_mla_kvcache")(kv_c, k_pe, kv_cache, slot_mapping, scale)
