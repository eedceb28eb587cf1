"""The expert networks: the reference computation and what the ops that contain it check alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.checks import FLOATS, expect, expect_choice, expect_dim, expect_dtype, expect_shape, nbytes, wide
from tskernel.dispatch.errors import KernelRefusedError
from tskernel.ops.moe._activations import ACTIVATIONS, activate
from tskernel.ops.moe._placement import block_experts, place
from tskernel.ops.moe._weights import (
    PACKED,
    QUANTS,
    check_activation_scale,
    check_weight,
    expert_weights,
    quantized_values,
)


def expert_outputs(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    experts: Tensor,
    top_k: int,
    *,
    activation: str,
    quant: str,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    a13_scale: Tensor | None,
    a2_scale: Tensor | None,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> Tensor:
    """Return each slot's expert applied to its token, unweighted fp32 (fp64) ``[T * top_k, H]``; 0 for skipped slots.

    Slots are grouped into blocks of one expert each. With ``S // E + 1`` slots to a block there are at most ``min(S, 2
    E)`` blocks: all sizes follow from shapes, padding at most doubles the work, and no expert but the used ones and
    the first is read.
    """
    dtype, num_experts, slots = wide(x), w13.shape[0], experts.shape[0]
    block = slots // num_experts + 1
    blocks: Any = torch.sym_min(slots, 2 * num_experts)
    places, ends = place(experts, num_experts, block)
    owner = block_experts(ends, blocks, block).clamp(min=0)  # nobody reads what blocks without an owner give
    skipped = experts < 0
    places = places.masked_fill(skipped, 0)

    token = torch.arange(slots, device=x.device).div(top_k, rounding_mode="floor")
    target = places.masked_fill(skipped, blocks * block)  # one row more, for the skipped
    source = token.new_zeros(blocks * block + 1).scatter(0, target, token)[: blocks * block]
    rows = quantized_values(x, a13_scale, quant, w13.dtype, dtype).index_select(0, source).unflatten(0, (blocks, block))

    h = torch.bmm(rows, expert_weights(w13, w13_scale, quant, owner, dtype).transpose(1, 2))
    if w13_bias is not None:
        h = h + w13_bias.index_select(0, owner).unsqueeze(1).to(dtype)
    h = quantized_values(activate(h, activation, swiglu_alpha, swiglu_limit), a2_scale, quant, w2.dtype, dtype)
    y = torch.bmm(h, expert_weights(w2, w2_scale, quant, owner, dtype).transpose(1, 2))
    if w2_bias is not None:
        y = y + w2_bias.index_select(0, owner).unsqueeze(1).to(dtype)
    return y.flatten(0, 1).index_select(0, places).masked_fill(skipped.unsqueeze(1), 0.0)


def weighted_sum(outputs: Tensor, topk_weights: Tensor, used: Tensor | None) -> Tensor:
    """Return ``sum_k weight[t, k] * outputs[t, k]`` as ``[T, H]``; choices that are not ``used`` are not read."""
    weighted = outputs * topk_weights.to(outputs.dtype).unsqueeze(2)
    return (weighted if used is None else weighted.masked_fill(~used.unsqueeze(2), 0.0)).sum(1)


def require_plain(weight_layout: str) -> None:
    """Refuse weights that were reordered for some other kernel."""
    if weight_layout != "plain":
        raise KernelRefusedError(f"the reference reads plain weights, these are laid out for {weight_layout!r}")


def check_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
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
    """Check tokens, weights, scales and biases against each other."""
    expect_choice("activation", activation, ACTIVATIONS)
    expect_choice("quant", quant, QUANTS)
    expect_dtype("x", x, FLOATS)
    expect_dim("x", x, 2)
    check_activation_scale("a13_scale", a13_scale, quant)
    check_activation_scale("a2_scale", a2_scale, quant)
    if weight_layout != "plain":
        return
    expect_dim("w13", w13, 3)
    expect_dim("w2", w2, 3)
    experts, hidden = w13.shape[0], x.shape[1]
    inner = w2.shape[2] * (2 if quant in PACKED else 1)
    expect(experts > 0, "w13.shape", "at least one expert", tuple(w13.shape))
    check_weight("w13", w13, w13_scale, quant, x, (experts, 2 * inner, hidden))
    check_weight("w2", w2, w2_scale, quant, x, (experts, hidden, inner))
    for name, bias, width in (("w13_bias", w13_bias, 2 * inner), ("w2_bias", w2_bias, hidden)):
        expect_shape(name, bias, (experts, width))
        expect_dtype(name, bias, (x.dtype, torch.float32))


def check_ids(name: str, ids: Tensor, tokens: int | None = None) -> None:
    """Check expert ids ``[T, top_k]``."""
    expect_dtype(name, ids, (torch.int32, torch.int64))
    expect_shape(name, ids, (tokens, None))


def check_expert_map(expert_map: Tensor | None) -> None:
    """Check the map from global to local expert ids."""
    if expert_map is not None:
        expect_dtype("expert_map", expert_map, (torch.int32,))
        expect_dim("expert_map", expert_map, 1)
        expect(expert_map.shape[0] > 0, "expert_map.shape", "at least one expert", tuple(expert_map.shape))


def experts_cost(x: Tensor, w13: Tensor, w2: Tensor, slots: int) -> tuple[int, int]:
    """Return (bytes, flops) of the two matrix products: the weights of at most ``slots`` experts are read once."""
    active = min(w13.shape[0], slots)
    weights = (nbytes(w13) + nbytes(w2)) * active // w13.shape[0]
    return weights + nbytes(x), 2 * slots * x.shape[1] * w13.shape[1] * 3 // 2
