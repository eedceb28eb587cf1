"""dequantize_int8: multiply int8 data by their scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import FLOATS, Cost, Make, Sample, empty, expect, expect_dtype, nbytes, op
from tskernel.ops.quantization._checks import check_choice_of_dtype, check_row_scale, dtype_name
from tskernel.ops.quantization._math import computing, rounded


@op(
    roles=("data",),
    traits={"granularity": "token", "out_dtype": "bfloat16", "width": 4096, "contiguous": True},
)
def dequantize_int8(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return ``data * scale``, the inverse of quantize_int8.

    Shapes: ``data [..., K]`` (any strides), ``scale`` one element (rank 0 or 1) or one per row ``[..., 1]`` ->
    ``[..., K]``, contiguous and new.
    Dtypes: ``data`` int8; ``scale`` fp32; ``out_dtype`` fp32, fp16 or bf16.
    Conventions: symmetric, no zero point; the product is fp32, rounded once to ``out_dtype``.
    Raises: ValueError for another dtype or shape.
    Source: Xiao et al. 2022 (SmoothQuant), https://arxiv.org/abs/2211.10438.
    """
    dtype = computing(scale)
    return rounded(data.to(dtype) * scale.to(dtype), out_dtype)


@dequantize_int8.check
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> None:
    expect_dtype("data", data, (torch.int8,))
    expect(data.dim() > 0, "data.shape", "at least one dimension", tuple(data.shape))
    check_row_scale(scale, data)
    check_choice_of_dtype("out_dtype", out_dtype, FLOATS)


@dequantize_int8.fake
def _(data: Tensor, out_dtype: torch.dtype) -> Tensor:
    return empty(data.shape, data, out_dtype)


@dequantize_int8.trait_values
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> dict[str, object]:
    return {
        "granularity": "tensor" if scale.dim() <= 1 else "token",
        "out_dtype": dtype_name(out_dtype),
        "width": data.shape[-1],
        "contiguous": data.is_contiguous(),
    }


@dequantize_int8.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    def ints(*shape: int) -> Tensor:
        return make.randint(-128, 128, shape, torch.int8)

    def scales(*shape: int) -> Tensor:
        return make.randn(shape, torch.float32).abs()

    yield Sample("token", data=ints(7, 64), scale=scales(7, 1), out_dtype=dtype)
    yield Sample("tensor", data=ints(2, 3, 77), scale=scales(1)[0], out_dtype=dtype)
    yield Sample("one", data=ints(1, 1), scale=scales(1), out_dtype=dtype)
    yield Sample("empty", data=ints(0, 64), scale=scales(0, 1), out_dtype=dtype)
    yield Sample("transposed", data=ints(64, 7).t(), scale=scales(7, 1), out_dtype=dtype)
    yield Sample("sliced", data=ints(7, 96)[:, 5:69], scale=scales(1, 7).t(), out_dtype=dtype)


@dequantize_int8.cost
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(bytes=nbytes(data, scale) + data.numel() * out_dtype.itemsize, flops=data.numel())
