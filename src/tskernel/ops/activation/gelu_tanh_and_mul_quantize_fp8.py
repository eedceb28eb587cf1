"""gelu_tanh_and_mul_quantize_fp8: the tanh GEGLU activation, quantized to fp8 in one rounding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tskernel.library import Cost, Make, Sample, op, wide
from tskernel.ops.activation._gated import gate_and_up
from tskernel.ops.activation._quantize import (
    check_quantize,
    empty_quantized,
    quantize_activation,
    quantize_cost,
    quantize_samples,
    quantize_traits,
)


@op(
    roles=("x",),
    traits={
        "width": 14336,
        "contiguous": True,
        "granularity": "token",
        "group_size": 128,
        "ue8m0": False,
        "dtype": "float8_e4m3fn",
    },
)
def gelu_tanh_and_mul_quantize_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``gelu_tanh_and_mul(x)`` in fp8 and its scale; ``value = data * scale``.

    The activation stays in fp32 and is rounded once, to fp8: what a fused kernel does. gelu_tanh_and_mul followed by
    a quantize op rounds to the dtype of ``x`` first and may differ by one fp8 step.

    Shapes: ``x [..., 2D]`` (any strides) -> data ``[..., D]`` and scale: "token" ``[..., 1]``; "group" of
    ``group_size`` columns, the last one may be partial, ``[..., ceil(D / group_size)]``; "tensor" a copy of
    ``scale``, one element, which is then required and otherwise refused. All contiguous and new.
    Dtypes: ``x`` fp32, fp16 or bf16; data ``dtype``: float8_e4m3fn (None), float8_e4m3fnuz or a float8_e5m2 form;
    scale fp32.
    Conventions: the gate is the first half of the columns; scales as in quantize_fp8_dynamic: scale = amax / max of
    the dtype, positive also for an all-zero group; with ``ue8m0`` the smallest power of two that is not below that,
    still in fp32. The data are divided by the returned scale and saturate; NaN stays NaN.
    Raises: ValueError when the number of columns is odd or 0, or ``scale`` does not go with ``granularity``.
    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202; Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433.
    """
    gate, up = gate_and_up(x, wide(x))
    y = F.gelu(gate, approximate="tanh") * up
    return quantize_activation(y, scale, granularity, group_size, ue8m0, dtype)


@gelu_tanh_and_mul_quantize_fp8.check
def _(
    x: Tensor, scale: Tensor | None, granularity: str, group_size: int, ue8m0: bool, dtype: torch.dtype | None
) -> None:
    check_quantize(x, scale, granularity, group_size, ue8m0, dtype)


@gelu_tanh_and_mul_quantize_fp8.fake
def _(
    x: Tensor, scale: Tensor | None, granularity: str, group_size: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return empty_quantized(x, scale, granularity, group_size, dtype)


@gelu_tanh_and_mul_quantize_fp8.trait_values
def _(x: Tensor, granularity: str, group_size: int, ue8m0: bool, dtype: torch.dtype | None) -> dict[str, object]:
    return quantize_traits(x, granularity, group_size, ue8m0, dtype)


@gelu_tanh_and_mul_quantize_fp8.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from quantize_samples(make, dtype)


@gelu_tanh_and_mul_quantize_fp8.cost
def _(x: Tensor) -> Cost:
    return quantize_cost(x)
