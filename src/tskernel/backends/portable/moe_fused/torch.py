"""moe_fused through torch's grouped matrix product, for unquantized weights on the CPU."""

from __future__ import annotations

from torch import Tensor

from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.ops.moe._experts import weighted_sum
from tskernel.ops.moe._grouped import GROUPED_DTYPES, grouped_expert_outputs, grouped_reason
from tskernel.ops.moe._placement import slot_experts


def rejects(x: Tensor, w13: Tensor, w2: Tensor) -> str | None:
    """Return why this call does not fit, or None; reads metadata only."""
    return grouped_reason(x, w13, w2)


@register_kernel(
    "moe",
    "moe_fused",
    capability=CapabilityRequirement(vendor="cpu"),  # untried on GPUs, whose grouped_mm has other limits
    signatures=same_formats("x", "w", dtypes=GROUPED_DTYPES),
    traits={"quant": {"none"}, "weight_layout": {"plain"}},
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=False,  # torch 2.13 can only trace grouped_mm in bf16
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
) -> Tensor:
    """Sort slots by expert, multiply group by group, and sum the weighted rows in fp32."""
    experts = slot_experts(topk_ids, w13.shape[0], expert_map)
    tokens, top_k = topk_ids.shape
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
    used = (experts >= 0).view(tokens, top_k)
    return weighted_sum(outputs.view(tokens, top_k, x.shape[1]), topk_weights, used).to(x.dtype)
