"""fused_add_rmsnorm in C++: sum, statistics and result of a row that stays in registers."""

from __future__ import annotations

from torch import Tensor

from tskernel._torch.binding import calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor, residual: Tensor, weight: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(weight=weight) or lib.many_dims(x=x, residual=residual)


@register_kernel(
    "norm",
    "fused_add_rmsnorm",
    capability=lib.CAPABILITY,
    signatures=formats(x=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls("tskernel_native::fused_add_rmsnorm", "x", "residual", "weight", "eps")
def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Launch the kernel of csrc/add_rmsnorm.cu."""
    lib.native("fused_add_rmsnorm")(x, residual, weight, eps)
