"""moe_topk in Triton: the experts of a token in one warp, the best of them by one maximum after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.backends.portable import _route_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


@register_kernel(
    "moe",
    "moe_topk",
    capability=host.CAPABILITY,
    signatures=formats(router_logits=host.FLOAT_DTYPES),
    traits={"num_experts": range(1, 8193)},
    priority=Priority.PORTABLE + 2,
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
    """Launch the choice of experts."""
    shape, at = (router_logits.shape[0], top_k), router_logits.device
    weights, ids = (torch.empty(shape, dtype=d, device=at) for d in (torch.float32, torch.int32))
    options = (top_k, score_function, renormalize, routed_scaling_factor, n_group, topk_group)
    device.topk(router_logits, correction_bias, weights, ids, *options)
    return weights, ids


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.topk_case(chip, "128 experts", 128, 8),
        device.topk_case(chip, "256 experts in 8 groups", 256, 8, n_group=8, score="sigmoid"),
        device.topk_case(chip, "384 experts", 384, 8, score="sqrt_softplus"),
    ]
