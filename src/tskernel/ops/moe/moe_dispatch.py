"""moe_dispatch: group the (token, choice) slots by expert into whole blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, expect, nbytes, op
from tskernel.ops.moe._experts import check_expert_map, check_ids
from tskernel.ops.moe._placement import block_experts, max_padded_slots, place, slot_experts


@op(
    roles=("topk_ids",),
    traits={"num_experts": 128, "top_k": 8, "block_size": 64, "expert_map": False},
    dtypes=(torch.int32, torch.int64),
)
def moe_dispatch(
    topk_ids: Tensor, num_experts: int, *, block_size: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Group slots by expert and pad each group to whole blocks.

    Returns ``(sorted_token_ids, expert_ids, num_tokens_post_padded)``.

    A slot is ``token * top_k + choice``. ``sorted_token_ids`` lists the slots by expert and, within one, in order;
    places that pad a block, and all places from ``num_tokens_post_padded`` on, hold ``T * top_k``. ``expert_ids``
    gives the local expert of each block of ``block_size`` places, -1 from the last used block on. An id that is
    negative, not below ``num_experts``, or mapped to -1 gets no place. Experts without slots get no block.

    ``num_experts`` counts local experts. With ``expert_map`` (global id to local id or -1) ids are global.

    Shapes: ``topk_ids [T, top_k]`` (any strides), ``expert_map [E_global]`` -> ``[P]``, ``[P / block_size]``, ``[1]``,
    where P is ``min(S * block_size, S + num_experts * (block_size - 1))`` rounded up to whole blocks and S is ``T *
    top_k``: an upper bound, so that sizes follow from shapes alone.
    Dtypes: ``topk_ids`` int32 or int64, ``expert_map`` int32; all results int32.
    Raises: ValueError when ``num_experts`` or ``block_size`` is below 1.
    Source: the layout of vLLM's ``moe_align_block_size``, https://github.com/vllm-project/vllm.
    """
    experts = slot_experts(topk_ids, num_experts, expert_map)
    slots = experts.shape[0]
    size = max_padded_slots(slots, num_experts, block_size)
    places, ends = place(experts, num_experts, block_size)
    target = torch.where(experts < 0, size, places)  # one place more, for the skipped
    order = places.new_full((size + 1,), slots).scatter(0, target, torch.arange(slots, device=places.device))[:size]
    owner = block_experts(ends, size // block_size, block_size)
    return order.to(torch.int32), owner.to(torch.int32), ends[-1:].to(torch.int32)


@moe_dispatch.check
def _(topk_ids: Tensor, num_experts: int, block_size: int, expert_map: Tensor | None) -> None:
    check_ids("topk_ids", topk_ids)
    expect(num_experts >= 1, "num_experts", "at least 1", num_experts)
    expect(block_size >= 1, "block_size", "at least 1", block_size)
    check_expert_map(expert_map)


@moe_dispatch.fake
def _(topk_ids: Tensor, num_experts: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    size = max_padded_slots(topk_ids.shape[0] * topk_ids.shape[1], num_experts, block_size)
    i32 = torch.int32
    return empty((size,), topk_ids, i32), empty((size // block_size,), topk_ids, i32), empty((1,), topk_ids, i32)


@moe_dispatch.trait_values
def _(topk_ids: Tensor, num_experts: int, block_size: int, expert_map: Tensor | None) -> dict[str, object]:
    return {
        "num_experts": num_experts,
        "top_k": topk_ids.shape[1],
        "block_size": block_size,
        "expert_map": expert_map is not None,
    }


@moe_dispatch.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, (tokens, top_k, experts) in {
        "ordinary": (17, 4, 8),
        "one": (1, 1, 1),
        "odd": (5, 3, 61),
        "empty": (0, 2, 4),
    }.items():
        ids = make.randint(-1, experts + 1, (tokens, top_k), dtype)
        yield Sample(name, topk_ids=ids, num_experts=experts, block_size=4)
    yield Sample("transposed", topk_ids=make.randint(0, 6, (3, 9), dtype).t(), num_experts=6, block_size=1)
    expert_map = make.tensor([-1, 1, -1, 0, 2, -1], torch.int32)
    yield Sample(
        "mapped", topk_ids=make.randint(-1, 7, (9, 3), dtype), num_experts=3, block_size=16, expert_map=expert_map
    )


@moe_dispatch.cost
def _(topk_ids: Tensor, block_size: int) -> Cost:
    return Cost(
        bytes=nbytes(topk_ids) + 4 * (topk_ids.numel() + topk_ids.numel() // block_size), flops=topk_ids.numel()
    )
