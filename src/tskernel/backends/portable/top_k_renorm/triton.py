"""top_k_renorm in Triton: a threshold is found by counting, without a sort."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _rows as host
from tskernel.backends.portable import _sample_triton as device
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


@register_kernel(
    "sampling",
    "top_k_renorm",
    capability=host.CAPABILITY,
    signatures=formats(probs=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def top_k_renorm(probs: Tensor, top_k: Tensor, *, out: Tensor) -> None:
    """Launch the search, the sums and the division."""
    device.renorm(probs, top_k, out, "top_k")


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return device.filter_cases(chip)
