"""Which expert serves which slot, and where its row stands once slots are grouped by expert.

A slot is one (token, choice) pair, numbered ``token * top_k + choice``. Expert -1 means that the slot is skipped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def slot_experts(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """Return each slot's local expert, int64 ``[T * top_k]``; -1 for ids out of range and experts elsewhere."""
    ids = topk_ids.reshape(-1).to(torch.int64)
    if expert_map is not None:
        known = expert_map.shape[0]
        inside = (ids >= 0) & (ids < known)
        ids = expert_map.index_select(0, ids.clamp(min=0, max=known - 1)).to(torch.int64).masked_fill(~inside, -1)
    return ids.masked_fill((ids < 0) | (ids >= num_experts), -1)


def max_padded_slots(slots: int, num_experts: int, block_size: int) -> int:
    """Return how many places slots can take at most when each expert's fill whole blocks; itself whole blocks."""
    bound: Any = torch.sym_min(slots * block_size, slots + num_experts * (block_size - 1))
    return (bound + block_size - 1) // block_size * block_size


def place(experts: Tensor, num_experts: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Return each slot's place ``[S]`` and each expert's end ``[E]``; skipped slots come after the last end.

    Experts follow each other, each starts at a whole block, and slots of one expert keep their order.
    """
    group = torch.where(experts < 0, num_experts, experts)
    order = torch.argsort(group, stable=True)
    sizes = group.new_zeros(num_experts + 1).scatter_add(0, group, torch.ones_like(group))
    padded = (sizes + (block_size - 1)).div(block_size, rounding_mode="floor") * block_size
    ends = padded.cumsum(0)
    shift = (ends - padded) - (sizes.cumsum(0) - sizes)  # from the place among sorted slots to the padded place
    rank = torch.arange(group.shape[0], device=group.device)
    places = torch.zeros_like(rank).scatter(0, order, rank + shift.index_select(0, group.index_select(0, order)))
    return places, ends[:num_experts]


def block_experts(ends: Tensor, blocks: int, block_size: int) -> Tensor:
    """Return the expert of each block, int64 ``[blocks]``; -1 for blocks after the last end."""
    first = torch.arange(blocks, device=ends.device) * block_size
    expert = torch.searchsorted(ends, first, right=True)
    return expert.masked_fill(expert >= ends.shape[0], -1)


def slot_experts_of_blocks(
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    *,
    slots: int,
    num_experts: int,
    block_size: int,
) -> Tensor:
    """Return the local expert of each slot, int64 ``[slots]``, from the results of ``moe_dispatch``."""
    slot = sorted_token_ids.to(torch.int64)
    place = torch.arange(slot.shape[0], device=slot.device)
    expert = expert_ids.to(torch.int64).index_select(0, place.div(block_size, rounding_mode="floor"))
    used = (slot >= 0) & (slot < slots) & (place < num_tokens_post_padded) & (expert >= 0) & (expert < num_experts)
    found = slot.new_full((slots + 1,), -1)  # the last element collects what is not used
    return found.scatter(0, torch.where(used, slot, slots), expert.masked_fill(~used, -1))[:slots]
