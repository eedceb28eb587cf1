"""moe_dispatch in C++: a stable counting sort, one launch for up to 4096 slots and two for more."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.ops.moe._placement import max_padded_slots

_MOST_EXPERTS: Final = 512
_SEGMENT: Final = 4096  # slots of a block


def rejects(num_experts: int, expert_map: Tensor | None) -> str | None:
    """Return why this call does not fit, or None."""
    if num_experts > _MOST_EXPERTS:
        return f"{num_experts} experts: expected at most {_MOST_EXPERTS}"
    return lib.crooked(expert_map=expert_map)


@register_kernel(
    "moe",
    "moe_dispatch",
    capability=lib.CAPABILITY,
    priority=Priority.PERFORMANT,
    rejects=rejects,
)
def moe_dispatch(
    topk_ids: Tensor, num_experts: int, *, block_size: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels of csrc/moe_dispatch.cu."""
    slots = topk_ids.shape[0] * topk_ids.shape[1]
    places = max_padded_slots(slots, num_experts, block_size)
    order = lib.new((places,), topk_ids, torch.int32)
    owners = lib.new((places // block_size,), topk_ids, torch.int32)
    padded = lib.new((1,), topk_ids, torch.int32)
    segments = -(-slots // _SEGMENT)
    counts = lib.new((segments * num_experts if segments > 1 else 0,), topk_ids, torch.int32)
    lib.native("moe_dispatch")(topk_ids, expert_map, order, owners, padded, counts, num_experts, block_size)
    return order, owners, padded
