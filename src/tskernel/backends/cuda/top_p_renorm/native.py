"""top_p_renorm in C++: masses by distance from the best value, then an exact search in one bin."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.backends.cuda._native_vocab import workspace
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(top_p: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(top_p=top_p)


@register_kernel(
    "sampling",
    "top_p_renorm",
    capability=lib.CAPABILITY,
    signatures=formats(probs=lib.FLOATS),
    priority=Priority.PERFORMANT,
    rejects=rejects,
)
def top_p_renorm(probs: Tensor, top_p: Tensor, *, out: Tensor) -> None:
    """Launch the kernels of csrc/top_k_top_p_renorm.cu."""
    lib.native("top_p_renorm")(probs, top_p, out, workspace(probs, filters=True))
