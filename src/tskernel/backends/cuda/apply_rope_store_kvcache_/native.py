"""apply_rope_store_kvcache_ in C++: one launch for rotation and both caches."""

from __future__ import annotations

from torch import Tensor

from tskernel._torch.binding import calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel


def rejects(positions: Tensor, slot_mapping: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(positions=positions, slot_mapping=slot_mapping)


@register_kernel(
    "embedding",
    "apply_rope_store_kvcache_",
    capability=lib.CAPABILITY,
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls(
    "tskernel_native::apply_rope_store_kvcache_",
    "positions",
    "q",
    "k",
    "v",
    "cos_sin_cache",
    "k_cache",
    "v_cache",
    "slot_mapping",
    "is_neox",
    "k_scale",
    "v_scale",
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
    """Launch the kernel of csrc/apply_rope.cu."""
    lib.native("apply_rope_store_kvcache_")(
        positions, q, k, v, cos_sin_cache, k_cache, v_cache, slot_mapping, is_neox, k_scale, v_scale
    )
