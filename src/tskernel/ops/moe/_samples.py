"""Inputs for the ops that run experts: every format, activation and option, at sizes that a CPU does in no time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tskernel.ops.moe._placement import block_experts, max_padded_slots, place, slot_experts
from tskernel.ops.moe._weights import FP8_BLOCK, MXFP4_BLOCK

_FP4_RMS = 2.93  # of all e2m1 codes alike
# tokens, top_k, experts, hidden, intermediate
_SHAPES = {
    "ordinary": (9, 2, 4, 64, 32),
    "one": (1, 1, 1, 16, 16),
    "odd": (5, 3, 7, 33, 19),
    "empty": (0, 2, 4, 64, 32),
    "all experts": (3, 5, 5, 32, 16),
}


def _weight(make: Any, dtype: torch.dtype, quant: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor | None]:
    """Return a weight whose values are of order 1/sqrt(columns), and its scale."""
    experts, rows, columns = shape
    size = columns**-0.5
    if quant == "none":
        return (make.randn(shape, torch.float32) * size).to(dtype), None
    if quant == "mxfp4":
        middle = 127 + round(math.log2(size / _FP4_RMS))
        blocks = (experts, rows, columns // MXFP4_BLOCK)
        exponent = make.randint(middle - 1, middle + 2, blocks, torch.int32).to(torch.uint8)
        return make.randint(0, 256, (experts, rows, columns // 2), torch.int32).to(torch.uint8), exponent
    if quant == "w4a16":
        scale = (make.rand((experts, rows, 2), torch.float32) + 0.5) * size / 4
        return make.randint(0, 256, (experts, rows, columns // 2), torch.int32).to(torch.uint8), scale
    blocks = (experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    scale_shape = {"fp8_tensor": (experts,), "fp8_block": blocks}.get(quant, (experts, rows))
    if quant == "int8":
        return make.randint(-127, 128, shape, torch.int32).to(torch.int8), (make.rand(scale_shape) + 0.5) * size / 64
    return make.randn(shape, torch.float8_e4m3fn), (make.rand(scale_shape) + 0.5) * size


def expert_sample(
    make: Any, dtype: torch.dtype, shape: tuple[int, ...], quant: str = "none", **options: Any
) -> dict[str, Any]:
    """Return the arguments of one ``moe_fused`` call."""
    tokens, top_k, experts, hidden, inner = shape
    w13, w13_scale = _weight(make, dtype, quant, (experts, 2 * inner, hidden))
    w2, w2_scale = _weight(make, dtype, quant, (experts, hidden, inner))
    return {
        "x": make.randn((tokens, hidden), dtype),
        "w13": w13,
        "w2": w2,
        "topk_weights": make.rand((tokens, top_k), torch.float32),
        "topk_ids": make.randint(0, experts, (tokens, top_k), torch.int32),
        "quant": quant,
        "w13_scale": w13_scale,
        "w2_scale": w2_scale,
        **options,
    }


def _biases(make: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Tensor]:
    _, _, experts, hidden, inner = shape
    return {
        "w13_bias": make.randn((experts, 2 * inner), torch.float32),
        "w2_bias": make.randn((experts, hidden), dtype),
    }


def _calls(make: Any, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, shape in _SHAPES.items():
        yield name, expert_sample(make, dtype, shape)
    small = _SHAPES["ordinary"]
    oai = {"activation": "swiglu_oai", "swiglu_alpha": 1.5, "swiglu_limit": 1.0, **_biases(make, dtype, small)}
    yield "swiglu_oai, biases", expert_sample(make, dtype, small, **oai)
    formats = {"fp8_tensor": "gelu", "fp8_token": "silu", "int8": "gelu_tanh", "mxfp4": "silu", "w4a16": "silu"}
    for quant, activation in formats.items():
        yield f"{quant}, {activation}", expert_sample(make, dtype, small, quant, activation=activation)
    yield "fp8_block", expert_sample(make, dtype, (3, 2, 3, 160, 72), "fp8_block")
    yield "fp8_block, whole", expert_sample(make, dtype, (3, 2, 3, 256, 128), "fp8_block")
    scales = {"a13_scale": make.full((1,), 0.01, torch.float32), "a2_scale": make.full((), 0.02, torch.float32)}
    for quant in ("fp8_tensor", "mxfp4"):
        yield f"{quant}, static", expert_sample(make, dtype, small, quant, **scales)
    strided = expert_sample(make, dtype, small, weight_layout="plain")
    strided["x"] = make.randn((64, 20), dtype).t()[::2][:9]
    strided["topk_ids"] = make.randint(-1, 5, (2, 9), torch.int64).t()
    yield "strided, ids out of range", strided


def expert_samples(make: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Yield samples of ``moe_fused``."""
    from tskernel.library import Sample

    for name, call in _calls(make, dtype):
        yield Sample(name, **call)
    mapped = expert_sample(make, dtype, _SHAPES["ordinary"], expert_map=make.tensor([2, -1, 0, 3, -1, 1], torch.int32))
    mapped["topk_ids"] = make.randint(0, 6, (9, 2), torch.int32)
    yield Sample("expert map", **mapped)


def dispatched_samples(make: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Yield samples of ``moe_experts``."""
    from tskernel.library import Sample

    for name, call in _calls(make, dtype):
        ids, experts, block_size = call.pop("topk_ids"), call["w13"].shape[0], 4
        del call["topk_weights"]
        slots = slot_experts(ids, experts, None)
        size = max_padded_slots(slots.shape[0], experts, block_size)
        places, ends = place(slots, experts, block_size)
        order = places.new_full((size + 1,), slots.shape[0])
        order = order.scatter(0, torch.where(slots < 0, size, places), torch.arange(slots.shape[0], device=ids.device))
        yield Sample(
            name,
            **call,
            sorted_token_ids=order[:size].to(torch.int32),
            expert_ids=block_experts(ends, size // block_size, block_size).to(torch.int32),
            num_tokens_post_padded=ends[-1:].to(torch.int32),
            top_k=ids.shape[1],
            block_size=block_size,
        )
