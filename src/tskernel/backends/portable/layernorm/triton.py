"""layernorm in Triton: a row is read once where it fits in registers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _norm_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats

COMPILE_PARTS = ("gfx942",)  # another op compiles the program for all parts


def rejects(out: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return host.unwritable(out=out)


@register_kernel(
    "norm",
    "layernorm",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    rejects=rejects,
    traceable=True,
)
def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, out: Tensor) -> None:
    """Launch the norm of rows, of their deviations from the mean."""
    device.norm(x, weight, out, eps, bias=bias, layer=True)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.case(chip, "width 2880, bias", 2880, LAYER=True, BIAS=True),
    ]
