"""moe_dispatch in Triton: slots are counted by chunk and expert, counts added up, and slots put in their places."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _route_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel


@register_kernel(
    "moe",
    "moe_dispatch",
    capability=host.CAPABILITY,
    traits={"num_experts": range(1, 1024)},
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def moe_dispatch(
    topk_ids: Tensor, num_experts: int, *, block_size: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the three steps."""
    return device.dispatch(topk_ids, num_experts, block_size, expert_map)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return device.dispatch_cases(chip)
