"""fused_add_rmsnorm in Triton: sum and norm in one pass over rows that fit in registers."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable import _norm_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor, residual: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return host.unwritable(x=x, residual=residual)


@register_kernel(
    "norm",
    "fused_add_rmsnorm",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    rejects=rejects,
    traceable=True,
)
def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Launch the norm of rows of the rounded sum, in place."""
    device.norm(x, weight, x, eps, residual=residual, total=residual)
