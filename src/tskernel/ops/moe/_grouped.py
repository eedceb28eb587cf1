"""Unquantized expert networks through torch's grouped matrix product: each expert's weights are read in place, once."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.ops.moe._activations import activate

GROUPED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 16  # bytes; what grouped_mm asks of row strides and base pointers


def grouped_reason(x: Tensor, w13: Tensor, w2: Tensor) -> str | None:
    """Return why grouped_mm does not take these weights, or None."""
    for name, width in (("H", x.shape[1]), ("I", w2.shape[2])):
        if width == 0 or width * x.element_size() % _ALIGNMENT:
            return f"{name}={width} in {x.dtype} is not a positive multiple of {_ALIGNMENT} bytes"
    for name, w in (("w13", w13), ("w2", w2)):
        if not w.is_contiguous():
            return f"{name} is not contiguous"
        if w.storage_offset() * w.element_size() % _ALIGNMENT:
            return f"{name} starts off a multiple of {_ALIGNMENT} bytes"
    return None


def grouped_expert_outputs(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    experts: Tensor,
    top_k: int,
    *,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> Tensor:
    """Return each slot's expert applied to its token, unweighted, fp32 ``[T * top_k, H]``; skipped slots hold garbage.

    Skipped slots are sorted behind the last group, where grouped_mm neither reads a weight nor writes a row.
    """
    num_experts = w13.shape[0]
    group = torch.where(experts < 0, num_experts, experts)
    order = torch.argsort(group, stable=True)
    sizes = group.new_zeros(num_experts + 1).scatter_add(0, group, torch.ones_like(group))
    ends = sizes[:num_experts].cumsum(0).to(torch.int32)
    owner = group.index_select(0, order).clamp(max=num_experts - 1)

    rows = x.index_select(0, order.div(top_k, rounding_mode="floor"))
    h = torch.nn.functional.grouped_mm(rows, w13.transpose(1, 2), offs=ends).to(torch.float32)
    if w13_bias is not None:
        h = h + w13_bias.index_select(0, owner)
    h = activate(h, activation, swiglu_alpha, swiglu_limit).to(x.dtype)
    y = torch.nn.functional.grouped_mm(h, w2.transpose(1, 2), offs=ends).to(torch.float32)
    if w2_bias is not None:
        y = y + w2_bias.index_select(0, owner)
    return torch.empty_like(y).index_copy(0, order, y)
