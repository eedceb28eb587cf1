"""apply_rope_ in C++: one launch for queries and keys."""

from __future__ import annotations

from torch import Tensor

from tskernel._torch.binding import calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel


def rejects(positions: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(positions=positions)


@register_kernel(
    "embedding",
    "apply_rope_",
    capability=lib.CAPABILITY,
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls("tskernel_native::apply_rope_", "positions", "q", "k", "cos_sin_cache", "is_neox", "head_size")
def apply_rope_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    is_neox: bool = True,
    head_size: int | None = None,
) -> None:
    """Launch the kernel of csrc/apply_rope.cu."""
    size = q.shape[-1] if head_size is None else head_size
    lib.native("apply_rope_")(positions, q, k, cos_sin_cache, is_neox, size)
