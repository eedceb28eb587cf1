"""swiglu_oai: the clamped SwiGLU of GPT-OSS."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, op, wide
from tskernel.ops.activation._gated import check_gated, empty_half, gated_cost, gated_samples, gated_traits
from tskernel.ops.activation._swiglu_oai import clamped_swiglu


@op(
    out=True,
    roles=("x",),
    traits={"width": 2880, "contiguous": True, "interleaved": False},
    shard={"tokens": {"x": 0, "return": 0}},
    vmap=("x",),
)
def swiglu_oai(x: Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = False) -> Tensor:
    """Return ``g * sigmoid(alpha * g) * (u + 1)`` with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``.

    The gate is the first half of the columns and up the second, as in ``silu_and_mul``; with ``interleaved``, which
    is how GPT-OSS checkpoints store the projection, the gate is the even columns and up the odd ones.

    Shapes: ``x [..., 2D]`` (any strides) -> ``[..., D]``, contiguous.
    Dtypes: ``x`` fp32, fp16 or bf16, the result alike; computed in fp32, one rounding.
    Raises: ValueError when the number of columns is odd or 0.
    Source: OpenAI 2025, gpt-oss model card, https://arxiv.org/abs/2508.10925, and the gpt-oss reference model.
    """
    return clamped_swiglu(x, wide(x), alpha, limit, interleaved).to(x.dtype).contiguous()


@swiglu_oai.check
def _(x: Tensor) -> None:
    check_gated(x)


@swiglu_oai.fake
def _(x: Tensor) -> Tensor:
    return empty_half(x)


@swiglu_oai.trait_values
def _(x: Tensor, interleaved: bool) -> dict[str, object]:
    return {**gated_traits(x), "interleaved": interleaved}


@swiglu_oai.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from gated_samples(make, dtype)
    x = make.randn((7, 64), dtype) * 8  # reaches both clamps
    yield Sample("interleaved", x=x, interleaved=True)
    yield Sample("options", x=x, alpha=1.0, limit=2.5)
    yield Sample("interleaved_transposed", x=make.randn((64, 7), dtype).t(), alpha=0.5, limit=1.0, interleaved=True)


@swiglu_oai.cost
def _(x: Tensor) -> Cost:
    return gated_cost(x)
