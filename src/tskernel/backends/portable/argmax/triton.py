"""argmax in Triton: a row is shared by as many programs as keep the device busy."""

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
    "argmax",
    capability=host.CAPABILITY,
    signatures=formats(logits=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def argmax(logits: Tensor) -> Tensor:
    """Launch one pass, and a second where rows were shared."""
    return device.argmax(logits)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return device.argmax_cases(chip)
