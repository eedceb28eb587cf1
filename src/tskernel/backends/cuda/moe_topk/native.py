"""moe_topk in C++: 32 lanes hold all logits of a token in registers."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats

_MOST_EXPERTS: Final = 512
_MOST_CHOICES: Final = 32
_SCORES: Final = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}


def rejects(router_logits: Tensor, top_k: int) -> str | None:
    """Return why this call does not fit, or None."""
    if router_logits.shape[1] > _MOST_EXPERTS:
        return f"{router_logits.shape[1]} experts: expected at most {_MOST_EXPERTS}"
    return f"top_k is {top_k}: expected at most {_MOST_CHOICES}" if top_k > _MOST_CHOICES else None


@register_kernel(
    "moe",
    "moe_topk",
    capability=lib.CAPABILITY,
    signatures=formats(router_logits=lib.FLOATS),
    priority=Priority.PERFORMANT,
    rejects=rejects,
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
    """Launch the kernel of csrc/moe_topk.cu."""
    shape = (router_logits.shape[0], top_k)
    weights, ids = lib.new(shape, router_logits, torch.float32), lib.new(shape, router_logits, torch.int32)
    lib.native("moe_topk")(
        router_logits,
        correction_bias,
        weights,
        ids,
        top_k,
        _SCORES[score_function],
        renormalize,
        routed_scaling_factor,
        n_group,
        topk_group,
    )
    return weights, ids
