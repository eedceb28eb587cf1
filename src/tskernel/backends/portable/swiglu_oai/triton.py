"""swiglu_oai in Triton: one pass, one rounding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _gated_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats

COMPILE_PARTS = ("gfx942",)  # another op compiles the program for all parts


def rejects(out: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return host.unwritable(out=out)


@register_kernel(
    "activation",
    "swiglu_oai",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    rejects=rejects,
    traceable=True,
)
def swiglu_oai(x: Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = False, out: Tensor) -> None:
    """Launch the activation of units of columns."""
    device.gated(x, out, "swiglu_interleaved" if interleaved else "swiglu", alpha, limit)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [device.case(chip, "interleaved", 2880, "swiglu_interleaved")]
