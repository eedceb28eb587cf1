"""verify_chain_greedy in Triton: one pass, many drafts to a program."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _rows as host
from tskernel.backends.portable import _sample_triton as device
from tskernel.dispatch.registry import Priority, register_kernel

COMPILE_PARTS = ("sm80", "sm90", "gfx942")  # nothing in it depends on newer parts


@register_kernel(
    "sampling",
    "verify_chain_greedy",
    capability=host.CAPABILITY,
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def verify_chain_greedy(draft_tokens: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the comparison."""
    return device.verify(draft_tokens, target_ids)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return device.verify_cases(chip)
