"""rmsnorm in Triton: a row is read once where it fits in registers."""

from __future__ import annotations

from typing import Any

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
    "rmsnorm",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    rejects=rejects,
    traceable=True,
)
def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor) -> None:
    """Launch the norm of rows."""
    device.norm(x, weight, out, eps)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.case(chip, "width 4096", 4096),
        device.case(chip, "width 20000, read twice", 20000),
    ]
