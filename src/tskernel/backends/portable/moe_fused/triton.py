"""moe_fused in Triton: slots grouped by expert, the gated product, the second one, and the weighted sum.

Few slots are grouped by the programs themselves: three launches, and only active experts' weights are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.backends.portable import _moe as moe
from tskernel.dispatch.registry import Priority, register_kernel


def rejects(x: Tensor, w13: Tensor, w2: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return moe.unreadable(x, w13, w2)


@register_kernel(
    "moe",
    "moe_fused",
    capability=moe.CAPABILITY,
    signatures=(),  # any that the op takes
    traits={"weight_layout": {"plain"}, "num_experts": range(1, 1024)},
    priority=Priority.PORTABLE + 2,
    rejects=rejects,
)
def moe_fused(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    quant: str = "none",
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    a13_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
    expert_map: Tensor | None = None,
    weight_layout: str = "plain",
    out: Tensor,
) -> None:
    """Launch what groups the slots, the two products and the sum."""
    if out.numel() == 0:
        return
    tokens, top_k = topk_ids.shape
    slots = moe.grouped(topk_ids, w13.shape[0], expert_map)
    y = torch.empty((tokens, top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    if top_k > 0:
        moe.outputs(
            x, moe.Expert(w13, w13_scale, w13_bias, a13_scale), moe.Expert(w2, w2_scale, w2_bias, a2_scale), slots,
            y.view(-1, x.shape[1]), quant=quant, activation=activation, alpha=swiglu_alpha, limit=swiglu_limit,
        )  # fmt: skip
    places = None if expert_map is None else expert_map.contiguous()
    moe.combine(y, topk_weights, out, used="local", ids=topk_ids, places=places, experts=w13.shape[0])


def compile_cases(chip: moe.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip: slots that programs find by themselves."""
    bf16, u8 = torch.bfloat16, torch.uint8
    return [
        moe.case(chip, "mxfp4 weights, few slots, gated", 16, "mxfp4", bf16, u8, gated=True, found=64),
        moe.case(chip, "bf16, few slots", 16, "none", bf16, bf16, found=256),
        moe.combine_case(chip, "width 2880", 2880, used="local"),
    ]
