"""gemma_rmsnorm in C++: rmsnorm with an offset of one on the weight."""

from __future__ import annotations

from torch import Tensor

from tskernel._torch.binding import Constant, calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor, weight: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(weight=weight) or lib.many_dims(x=x)


@register_kernel(
    "norm",
    "gemma_rmsnorm",
    capability=lib.CAPABILITY,
    signatures=formats(x=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls("tskernel_native::rmsnorm", "x", "weight", "out", "eps", Constant(1.0))
def gemma_rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor) -> None:
    """Launch the kernel of csrc/rmsnorm.cu."""
    lib.native("rmsnorm")(x, weight, out, eps, 1.0)
