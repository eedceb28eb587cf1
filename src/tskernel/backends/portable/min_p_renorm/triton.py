"""min_p_renorm in Triton: maxima, sums and the division."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _rows as host
from tskernel.backends.portable import _sample_triton as device
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats

COMPILE_PARTS = ("sm80", "sm90", "gfx942")  # nothing in it depends on newer parts


@register_kernel(
    "sampling",
    "min_p_renorm",
    capability=host.CAPABILITY,
    signatures=formats(probs=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def min_p_renorm(probs: Tensor, min_p: Tensor, *, out: Tensor) -> None:
    """Launch the three passes."""
    device.renorm(probs, min_p, out, "min_p")


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return device.renorm_cases(chip)
