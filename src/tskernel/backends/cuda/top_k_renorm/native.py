"""top_k_renorm in C++: histograms of the distance from the best value, then an exact search in one bin."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.backends.cuda._native_vocab import workspace
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(top_k: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(top_k=top_k)


@register_kernel(
    "sampling",
    "top_k_renorm",
    capability=lib.CAPABILITY,
    signatures=formats(probs=lib.FLOATS),
    priority=Priority.PERFORMANT,
    rejects=rejects,
)
def top_k_renorm(probs: Tensor, top_k: Tensor, *, out: Tensor) -> None:
    """Launch the kernels of csrc/top_k_top_p_renorm.cu."""
    lib.native("top_k_renorm")(probs, top_k, out, workspace(probs, filters=True))
