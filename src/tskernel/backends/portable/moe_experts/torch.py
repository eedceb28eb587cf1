"""moe_experts through torch's grouped matrix product, for unquantized weights on the CPU."""

from __future__ import annotations

from torch import Tensor

from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.ops.moe._grouped import GROUPED_DTYPES, grouped_expert_outputs, grouped_reason
from tskernel.ops.moe._placement import slot_experts_of_blocks


def rejects(x: Tensor, w13: Tensor, w2: Tensor) -> str | None:
    """Return why this call does not fit, or None; reads metadata only."""
    return grouped_reason(x, w13, w2)


@register_kernel(
    "moe",
    "moe_experts",
    capability=CapabilityRequirement(vendor="cpu"),  # untried on GPUs, whose grouped_mm has other limits
    signatures=same_formats("x", "w", dtypes=GROUPED_DTYPES),
    traits={"quant": {"none"}, "weight_layout": {"plain"}},
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=False,  # torch 2.13 can only trace grouped_mm in bf16
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
    """Recover each slot's expert, then multiply group by group."""
    slots = x.shape[0] * top_k
    experts = slot_experts_of_blocks(
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        slots=slots,
        num_experts=w13.shape[0],
        block_size=block_size,
    )
    outputs = grouped_expert_outputs(
        x,
        w13,
        w2,
        experts,
        top_k,
        activation=activation,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        swiglu_alpha=swiglu_alpha,
        swiglu_limit=swiglu_limit,
    )
    outputs = outputs.masked_fill((experts < 0).unsqueeze(1), 0.0).to(x.dtype)
    return outputs.view(x.shape[0], top_k, x.shape[1])
