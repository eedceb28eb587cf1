"""moe_fused: the routed experts of a layer, from tokens and routing to the weighted sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import FLOATS, Cost, Make, Sample, empty, expect_dtype, expect_shape, nbytes, op
from tskernel.ops.moe._experts import (
    check_expert_map,
    check_experts,
    check_ids,
    expert_outputs,
    experts_cost,
    require_plain,
    weighted_sum,
)
from tskernel.ops.moe._placement import slot_experts
from tskernel.ops.moe._samples import expert_samples
from tskernel.ops.moe._weights import PACKED


@op(
    out=True,
    roles={"x": "x", "w": "w13"},
    traits={
        "activation": "silu",
        "quant": "none",
        "weight_layout": "plain",
        "num_experts": 128,
        "top_k": 8,
        "hidden": 2048,
        "intermediate": 768,
        "expert_map": False,
        "biased": False,
    },
    shard={"tokens": {"x": 0, "topk_weights": 0, "topk_ids": 0, "return": 0}},
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
    """Return ``sum_k topk_weights[t, k] * expert(topk_ids[t, k])(x[t])``; expert = ``w2 @ act(w13 @ x + b13) + b2``.

    Equals ``moe_dispatch``, ``moe_experts`` and ``moe_combine`` in a row, with one rounding at the end.

    ``w13`` holds the gate rows, then the up rows. ``activation`` is ``silu``, ``gelu`` (erf) or ``gelu_tanh`` of the
    gate times up, or ``swiglu_oai``: gate clamped above and up clamped both ways at ``swiglu_limit``, ``gate *
    sigmoid(swiglu_alpha * gate) * (up + 1)``.

    An id that is negative or not below E adds 0, whatever its weight, and touches no memory. With ``expert_map``
    (global id to local id or -1) ids are global, and experts that are not local add 0. Weights of experts that no
    token chose are not read.

    ``quant`` gives the storage of both weights (value = stored * scale) and how activations are rounded before each
    product:

    - ``none``: weights in the dtype of ``x``.
    - ``fp8_tensor``: fp8, scale ``[E]``; ``fp8_token``: fp8, scale ``[E, rows]``; activations fp8 per row.
    - ``fp8_block``: fp8, scale ``[E, ceil(rows/128), ceil(columns/128)]``; activations fp8 per 128 values of a row.
    - ``int8``: int8, scale ``[E, rows]``; activations int8 per row.
    - ``mxfp4``: e2m1 pairs in uint8 ``[E, rows, columns/2]``, low nibble first, scale bytes ``2^(b-127)`` ``[E, rows,
      columns/32]``; activations as they are, or e4m3 with a static scale.
    - ``w4a16``: unsigned 4-bit pairs in uint8 ``[E, rows, columns/2]``, low nibble first, value ``(q - 8) * scale``,
      scale ``[E, rows, groups]`` over equal groups of columns; activations as they are.

    Activation scales are dynamic, ``max(|row|) / format maximum``, so that a token's result never depends on other
    tokens; ``a13_scale`` and ``a2_scale`` (one element) make them static for the first and the second product.

    ``weight_layout`` is "plain", or names the order in which a kernel's ``weight_preprocessor`` left weights and
    scales. Only that kernel reads them then, and their shapes are its own affair; ``moe_plan`` and
    ``moe_process_weights`` see to it.

    Shapes: ``x [T, H]`` (any strides), ``w13 [E, 2I, H]``, ``w2 [E, H, I]``, ``topk_weights`` and ``topk_ids`` ``[T,
    top_k]``, ``w13_bias [E, 2I]``, ``w2_bias [E, H]``, ``expert_map [E_global]`` -> ``[T, H]``.
    Dtypes: ``x`` fp32, fp16 or bf16, the result alike; ``topk_weights`` fp32, fp16 or bf16; ``topk_ids`` int32 or
    int64; ``expert_map`` int32; biases like ``x`` or fp32; scales fp32 (``mxfp4`` uint8 or float8_e8m0fnu, ``w4a16``
    also like ``x``); products and sums accumulate in fp32.
    Raises: ValueError for an unknown ``activation`` or ``quant``, a missing or superfluous scale, or shapes that do
    not fit.
    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; ``swiglu_oai``: gpt-oss,
    https://arxiv.org/abs/2508.10925.
    """
    require_plain(weight_layout)
    experts = slot_experts(topk_ids, w13.shape[0], expert_map)
    tokens, top_k = topk_ids.shape
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
    used = (experts >= 0).view(tokens, top_k)
    return weighted_sum(outputs.view(tokens, top_k, x.shape[1]), topk_weights, used).to(x.dtype)


@moe_fused.check
def _(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    quant: str,
    weight_layout: str,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    a13_scale: Tensor | None,
    a2_scale: Tensor | None,
    expert_map: Tensor | None,
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
    check_ids("topk_ids", topk_ids, x.shape[0])
    expect_dtype("topk_weights", topk_weights, FLOATS)
    expect_shape("topk_weights", topk_weights, topk_ids.shape)
    check_expert_map(expert_map)


@moe_fused.fake
def _(x: Tensor) -> Tensor:
    return empty(x.shape, x)


@moe_fused.trait_values
def _(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    activation: str,
    quant: str,
    weight_layout: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    expert_map: Tensor | None,
) -> dict[str, object]:
    return {
        "activation": activation,
        "quant": quant,
        "weight_layout": weight_layout,
        "num_experts": w13.shape[0],
        "top_k": topk_ids.shape[1],
        "hidden": x.shape[1],
        "intermediate": w2.shape[2] * (2 if quant in PACKED else 1),
        "expert_map": expert_map is not None,
        "biased": w13_bias is not None or w2_bias is not None,
    }


@moe_fused.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from expert_samples(make, dtype)


@moe_fused.cost
def _(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor) -> Cost:
    read, flops = experts_cost(x, w13, w2, topk_ids.numel())
    return Cost(bytes=read + nbytes(x) + nbytes(topk_ids) * 2, flops=flops)
