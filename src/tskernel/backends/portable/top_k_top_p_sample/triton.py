"""top_k_top_p_sample in Triton: thresholds by counting and by mass, then the race; no sort."""

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
    "top_k_top_p_sample",
    capability=host.CAPABILITY,
    signatures=formats(logits=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def top_k_top_p_sample(
    logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor
) -> Tensor:
    """Launch both searches and the race."""
    return device.sample(logits, top_k, top_p, temperature, seed, offset)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return device.race_cases(chip)
