"""dequantize_fp8: multiply fp8 data by their scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import (
    FLOATS,
    Cost,
    Make,
    Sample,
    empty,
    expect,
    expect_choice,
    expect_dtype,
    expect_shape,
    nbytes,
    op,
)
from tskernel.ops.quantization._checks import (
    FP8_DTYPES,
    GRANULARITIES,
    ceil_div,
    check_block_scale,
    check_choice_of_dtype,
    check_row_scale,
    dtype_name,
)
from tskernel.ops.quantization._math import computing, rounded, spread


@op(
    roles=("data",),
    traits={"granularity": "token", "group_size": 128, "out_dtype": "bfloat16", "width": 4096, "contiguous": True},
)
def dequantize_fp8(
    data: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype,
    *,
    granularity: str = "token",
    group_size: int = 128,
) -> Tensor:
    """Return ``data * scale``, the inverse of quantize_fp8 and quantize_fp8_dynamic.

    Shapes: ``data [..., K]`` (any strides); ``scale`` for "tensor" and "token" one element (rank 0 or 1) or ``[...,
    1]``, for "group" ``[..., ceil(K/group_size)]``, for "block" ``[..., ceil(N/group_size), ceil(K/group_size)]`` ->
    ``[..., K]``, contiguous and new.
    Dtypes: ``data`` a float8 dtype, which decides the encoding (0x38 is 1.0 as e4m3fn and 0.5 as e4m3fnuz); ``scale``
    fp32; ``out_dtype`` fp32, fp16 or bf16.
    Conventions: the product is fp32, rounded once to ``out_dtype``. NaN data stay NaN.
    Raises: ValueError for another shape of ``scale``, another granularity, ``group_size`` < 1 or another
    ``out_dtype``.
    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433.
    """
    dtype = computing(data, scale)
    each = scale.to(dtype)
    if granularity in ("group", "block"):
        each = spread(each, data.shape[-1], group_size)
    if granularity == "block":
        each = spread(each, data.shape[-2], group_size, -2)
    return rounded(data.to(dtype) * each, out_dtype)


@dequantize_fp8.check
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype, granularity: str, group_size: int) -> None:
    expect_dtype("data", data, FP8_DTYPES)
    expect(data.dim() > 0, "data.shape", "at least one dimension", tuple(data.shape))
    check_choice_of_dtype("out_dtype", out_dtype, FLOATS)
    expect_choice("granularity", granularity, GRANULARITIES)
    expect(group_size > 0, "group_size", "at least 1", group_size)
    if granularity == "group":
        check_block_scale(scale, data, data.shape[-1], group_size, (torch.float32,))
    elif granularity == "block":
        expect(data.dim() >= 2, "data.shape", "at least two dimensions for blocks", tuple(data.shape))
        *lead, rows, columns = data.shape
        expect_dtype("scale", scale, (torch.float32,))
        expect_shape("scale", scale, (*lead, ceil_div(rows, group_size), ceil_div(columns, group_size)))
    else:
        check_row_scale(scale, data)


@dequantize_fp8.fake
def _(data: Tensor, out_dtype: torch.dtype) -> Tensor:
    return empty(data.shape, data, out_dtype)


@dequantize_fp8.trait_values
def _(data: Tensor, out_dtype: torch.dtype, granularity: str, group_size: int) -> dict[str, object]:
    return {
        "granularity": granularity,
        "group_size": group_size,
        "out_dtype": dtype_name(out_dtype),
        "width": data.shape[-1],
        "contiguous": data.is_contiguous(),
    }


@dequantize_fp8.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    def fp8(*shape: int) -> Tensor:
        return make.randn(shape, torch.float32).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        return make.randn(shape, torch.float32).abs()

    yield Sample("tensor", data=fp8(7, 64), scale=scales(1), out_dtype=dtype, granularity="tensor")
    yield Sample("scalar", data=fp8(2, 3, 77), scale=scales(1)[0], out_dtype=dtype)
    yield Sample("token", data=fp8(7, 64), scale=scales(7, 1), out_dtype=dtype)
    yield Sample("group", data=fp8(3, 5, 160), scale=scales(3, 5, 2), out_dtype=dtype, granularity="group")
    yield Sample("block", data=fp8(19, 40), scale=scales(2, 3), out_dtype=dtype, granularity="block", group_size=16)
    yield Sample("transposed", data=fp8(64, 7).t(), scale=scales(7, 1), out_dtype=dtype)
    yield Sample("sliced", data=fp8(7, 96)[:, 5:69], scale=scales(1, 7).t(), out_dtype=dtype)
    yield Sample("empty", data=fp8(0, 64), scale=scales(0, 1), out_dtype=dtype)
    yield Sample("one", data=fp8(1, 1), scale=scales(1, 1), out_dtype=dtype)
    yield Sample("e5m2", data=fp8(7, 64).to(torch.float8_e5m2), scale=scales(7, 1), out_dtype=dtype)
    fnuz = make.randn((7, 64), torch.float32).to(torch.float8_e4m3fnuz)
    yield Sample("e4m3fnuz", data=fnuz, scale=scales(7, 1), out_dtype=dtype)


@dequantize_fp8.cost
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(bytes=nbytes(data, scale) + data.numel() * out_dtype.itemsize, flops=data.numel())
