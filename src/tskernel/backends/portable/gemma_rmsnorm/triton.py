"""gemma_rmsnorm in Triton: a row is read once where it fits in registers."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable import _norm_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(out: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return host.unwritable(out=out)


@register_kernel(
    "norm",
    "gemma_rmsnorm",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    rejects=rejects,
    traceable=True,
)
def gemma_rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor) -> None:
    """Launch the norm of rows, with one added to the weight."""
    device.norm(x, weight, out, eps, gemma=True)
