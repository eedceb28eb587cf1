"""swiglu_oai_quantize_fp8: the clamped SwiGLU of GPT-OSS, quantized to fp8 in one rounding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, op, wide
from tskernel.ops.activation._quantize import (
    check_quantize,
    empty_quantized,
    quantize_activation,
    quantize_cost,
    quantize_samples,
    quantize_traits,
)
from tskernel.ops.activation._swiglu_oai import clamped_swiglu


@op(
    roles=("x",),
    traits={
        "width": 2880,
        "contiguous": True,
        "granularity": "token",
        "group_size": 128,
        "ue8m0": False,
        "dtype": "float8_e4m3fn",
        "interleaved": False,
    },
)
def swiglu_oai_quantize_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = False,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``swiglu_oai(x)`` in fp8 and its scale; ``value = data * scale``.

    The activation stays in fp32 and is rounded once, to fp8: what a fused kernel does. swiglu_oai followed by a
    quantize op rounds to the dtype of ``x`` first and may differ by one fp8 step.

    Shapes: ``x [..., 2D]`` (any strides) -> data ``[..., D]`` and scale: "token" ``[..., 1]``; "group" of
    ``group_size`` columns, the last one may be partial, ``[..., ceil(D / group_size)]``; "tensor" a copy of
    ``scale``, one element, which is then required and otherwise refused. All contiguous and new.
    Dtypes: ``x`` fp32, fp16 or bf16; data ``dtype``: float8_e4m3fn (None), float8_e4m3fnuz or a float8_e5m2 form;
    scale fp32.
    Conventions: ``alpha``, ``limit`` and ``interleaved`` as in swiglu_oai; scales as in quantize_fp8_dynamic: scale =
    amax / max of the dtype, positive also for an all-zero group; with ``ue8m0`` the smallest power of two that is not
    below that, still in fp32. The data are divided by the returned scale and saturate; NaN stays NaN.
    Raises: ValueError when the number of columns is odd or 0, or ``scale`` does not go with ``granularity``.
    Source: OpenAI 2025, https://arxiv.org/abs/2508.10925; Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433.
    """
    y = clamped_swiglu(x, wide(x), alpha, limit, interleaved)
    return quantize_activation(y, scale, granularity, group_size, ue8m0, dtype)


@swiglu_oai_quantize_fp8.check
def _(
    x: Tensor, scale: Tensor | None, granularity: str, group_size: int, ue8m0: bool, dtype: torch.dtype | None
) -> None:
    check_quantize(x, scale, granularity, group_size, ue8m0, dtype)


@swiglu_oai_quantize_fp8.fake
def _(
    x: Tensor, scale: Tensor | None, granularity: str, group_size: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return empty_quantized(x, scale, granularity, group_size, dtype)


@swiglu_oai_quantize_fp8.trait_values
def _(
    x: Tensor, interleaved: bool, granularity: str, group_size: int, ue8m0: bool, dtype: torch.dtype | None
) -> dict[str, object]:
    return {**quantize_traits(x, granularity, group_size, ue8m0, dtype), "interleaved": interleaved}


@swiglu_oai_quantize_fp8.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from quantize_samples(make, dtype)
    x = make.randn((7, 64), dtype) * 8  # reaches both clamps
    yield Sample("interleaved", x=x, interleaved=True)
    yield Sample("options", x=x, alpha=1.0, limit=2.5)


@swiglu_oai_quantize_fp8.cost
def _(x: Tensor) -> Cost:
    return quantize_cost(x)
