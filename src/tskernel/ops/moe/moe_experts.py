"""moe_experts: apply to each (token, choice) slot its expert, without weighting."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, expect, expect_dtype, expect_shape, nbytes, op
from tskernel.ops.moe._experts import check_experts, expert_outputs, experts_cost, require_plain
from tskernel.ops.moe._placement import slot_experts_of_blocks
from tskernel.ops.moe._samples import dispatched_samples
from tskernel.ops.moe._weights import PACKED


@op(
    roles={"x": "x", "w": "w13"},
    traits={
        "activation": "silu",
        "quant": "none",
        "weight_layout": "plain",
        "num_experts": 128,
        "top_k": 8,
        "hidden": 2048,
        "intermediate": 768,
        "block_size": 64,
        "biased": False,
    },
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
    """Return ``expert(topk_ids[t, k])(x[t])`` at ``[t, k]``, not multiplied by any weight; ``moe_combine`` does that.

    ``sorted_token_ids``, ``expert_ids`` and ``num_tokens_post_padded`` are the results of ``moe_dispatch`` for the
    same ``block_size``. Slots that have no place there give 0. Everything else is as in ``moe_fused``, with a rounding
    to the dtype of ``x`` at the end.

    Shapes: ``x [T, H]`` (any strides), ``w13 [E, 2I, H]``, ``w2 [E, H, I]``, ``sorted_token_ids [P]``,
    ``expert_ids [ceil(P / block_size)]``, ``num_tokens_post_padded [1]`` -> ``[T, top_k, H]``.
    Dtypes: as in ``moe_fused``; ``sorted_token_ids``, ``expert_ids`` and ``num_tokens_post_padded`` int32.
    Raises: ValueError for an unknown ``activation`` or ``quant``, a missing or superfluous scale, or shapes that do
    not fit.
    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538.
    """
    require_plain(weight_layout)
    tokens = x.shape[0]
    experts = slot_experts_of_blocks(
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        slots=tokens * top_k,
        num_experts=w13.shape[0],
        block_size=block_size,
    )
    outputs = expert_outputs(
        x,
        w13,
        w2,
        experts,
        top_k,
        activation=activation,
        quant=quant,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        a13_scale=a13_scale,
        a2_scale=a2_scale,
        swiglu_alpha=swiglu_alpha,
        swiglu_limit=swiglu_limit,
    )
    return outputs.view(tokens, top_k, x.shape[1]).to(x.dtype)


@moe_experts.check
def _(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    top_k: int,
    block_size: int,
    activation: str,
    quant: str,
    weight_layout: str,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    a13_scale: Tensor | None,
    a2_scale: Tensor | None,
) -> None:
    check_experts(
        x,
        w13,
        w2,
        activation=activation,
        quant=quant,
        weight_layout=weight_layout,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        a13_scale=a13_scale,
        a2_scale=a2_scale,
    )
    expect(top_k >= 1, "top_k", "at least 1", top_k)
    expect(block_size >= 1, "block_size", "at least 1", block_size)
    expect_shape("sorted_token_ids", sorted_token_ids, (None,))
    expect_shape("expert_ids", expert_ids, ((sorted_token_ids.shape[0] + block_size - 1) // block_size,))
    expect_shape("num_tokens_post_padded", num_tokens_post_padded, (1,))
    expect_dtype("sorted_token_ids", sorted_token_ids, (torch.int32,))
    expect_dtype("expert_ids", expert_ids, (torch.int32,))
    expect_dtype("num_tokens_post_padded", num_tokens_post_padded, (torch.int32,))


@moe_experts.fake
def _(x: Tensor, top_k: int) -> Tensor:
    return empty((x.shape[0], top_k, x.shape[1]), x)


@moe_experts.trait_values
def _(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    block_size: int,
    activation: str,
    quant: str,
    weight_layout: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> dict[str, object]:
    return {
        "activation": activation,
        "quant": quant,
        "weight_layout": weight_layout,
        "num_experts": w13.shape[0],
        "top_k": top_k,
        "hidden": x.shape[1],
        "intermediate": w2.shape[2] * (2 if quant in PACKED else 1),
        "block_size": block_size,
        "biased": w13_bias is not None or w2_bias is not None,
    }


@moe_experts.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from dispatched_samples(make, dtype)


@moe_experts.cost
def _(x: Tensor, w13: Tensor, w2: Tensor, top_k: int) -> Cost:
    read, flops = experts_cost(x, w13, w2, x.shape[0] * top_k)
    return Cost(bytes=read + nbytes(x) * top_k, flops=flops)
