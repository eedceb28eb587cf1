"""min_p_renorm in C++: maxima, the mass that is kept, and the quotients."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.backends.cuda._native_vocab import workspace
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(min_p: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(min_p=min_p)


@register_kernel(
    "sampling",
    "min_p_renorm",
    capability=lib.CAPABILITY,
    signatures=formats(probs=lib.FLOATS),
    priority=Priority.PERFORMANT,
    rejects=rejects,
)
def min_p_renorm(probs: Tensor, min_p: Tensor, *, out: Tensor) -> None:
    """Launch the kernels of csrc/min_p_renorm.cu."""
    lib.native("min_p_renorm")(probs, min_p, out, workspace(probs, filters=False))
