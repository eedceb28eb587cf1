"""moe_experts in Triton: tiles of one expert's slots, both products with weights unpacked and scaled in registers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.backends.portable import _moe as moe
from tskernel.dispatch.registry import Priority, register_kernel


def rejects(x: Tensor, w13: Tensor, w2: Tensor, block_size: int) -> str | None:
    """Return why this call does not fit, or None."""
    if block_size > moe.TALLEST:
        return f"blocks of {block_size} slots are taller than a tile, expected at most {moe.TALLEST}"
    return moe.unreadable(x, w13, w2)


@register_kernel(
    "moe",
    "moe_experts",
    capability=moe.CAPABILITY,
    signatures=(),  # any that the op takes
    traits={"weight_layout": {"plain"}},
    priority=Priority.PORTABLE + 2,
    rejects=rejects,
)
def moe_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    top_k: int,
    *,
    block_size: int,
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
    weight_layout: str = "plain",
) -> Tensor:
    """Zero all slots, since those without a place give 0, and launch the two products over the blocks."""
    slots = moe.Slots(
        x.shape[0] * top_k, top_k, block_size, sorted_token_ids.contiguous(), expert_ids.contiguous(),
        num_tokens_post_padded,
    )  # fmt: skip
    y = torch.zeros((x.shape[0], top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    moe.outputs(
        x, moe.Expert(w13, w13_scale, w13_bias, a13_scale), moe.Expert(w2, w2_scale, w2_bias, a2_scale), slots,
        y.view(-1, x.shape[1]), quant=quant, activation=activation, alpha=swiglu_alpha, limit=swiglu_limit,
    )  # fmt: skip
    return y


def compile_cases(chip: moe.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip: sorted blocks."""
    bf16, e4m3, u8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
    fp8 = torch.float8_e4m3fnuz if chip.hip and chip.shared < 100 << 10 else e4m3
    return [
        moe.case(chip, "bf16, 128 slots, gated", 128, "none", bf16, bf16, gated=True),
        moe.case(chip, "mxfp4 weights, 64 slots, gated", 64, "mxfp4", bf16, u8, gated=True),
        moe.case(chip, "fp8 blocks, 64 slots", 64, "fp8_block", fp8, fp8),
    ]
