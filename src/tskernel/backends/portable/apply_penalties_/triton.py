"""apply_penalties_ in Triton: one pass in place."""

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
    "apply_penalties_",
    capability=host.CAPABILITY,
    signatures=formats(logits=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def apply_penalties_(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    repetition_penalty: Tensor,
) -> None:
    """Launch the pass."""
    device.penalties(logits, prompt_mask, output_counts, presence_penalty, frequency_penalty, repetition_penalty)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return device.penalty_cases(chip)
