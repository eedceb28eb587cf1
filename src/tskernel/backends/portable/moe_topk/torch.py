"""moe_topk through torch.topk on keys that hold value and index: ties fall to the lowest expert without a full sort."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats
from tskernel.ops.moe._router import router_choice, router_scores, routing_weights


@register_kernel(
    "moe",
    "moe_topk",
    capability=ANY,
    signatures=formats(router_logits=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    traceable=True,
)
def moe_topk(
    router_logits: Tensor,
    top_k: int,
    *,
    score_function: str = "softmax",
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rank by ``(value, -index)``, packed into one int64."""
    scores = router_scores(router_logits, score_function, torch.float32)
    choice = router_choice(router_logits, scores, correction_bias, n_group, topk_group)
    experts = choice.shape[1]
    # Adding zero turns -0 into +0; with their magnitude bits flipped, negative floats order like their bits.
    bits = (choice + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    key = ordered * experts + torch.arange(experts - 1, -1, -1, device=choice.device)
    best = torch.topk(key, top_k, dim=-1).values
    ids = (experts - 1) - best.remainder(experts)
    weights = routing_weights(scores.gather(1, ids), renormalize, routed_scaling_factor)
    return weights, ids.to(torch.int32)
