"""dequantize_mxfp8: multiply fp8 data by the power-of-two scale of their block of 32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import FLOATS, Cost, Make, Sample, empty, expect, expect_dtype, nbytes, op
from tskernel.ops.quantization._checks import (
    E8M0_DTYPES,
    MX_DTYPES,
    check_block_scale,
    check_choice_of_dtype,
    dtype_name,
)
from tskernel.ops.quantization._math import computing, e8m0_values, rounded, spread


@op(
    roles=("data",),
    traits={"out_dtype": "bfloat16", "width": 4096, "contiguous": True},
    shard={"tokens": {"data": 0, "scale": 0, "return": 0}},
)
def dequantize_mxfp8(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return ``data * 2^(byte - 127)``, the inverse of quantize_mxfp8.

    Shapes: ``data [..., K]`` (any strides), ``scale [..., ceil(K/32)]`` -> ``[..., K]``, contiguous and new.
    Dtypes: ``data`` float8_e4m3fn or float8_e5m2; ``scale`` uint8 or float8_e8m0fnu, read alike; ``out_dtype`` fp32,
    fp16 or bf16.
    Conventions: byte 255 is NaN for its whole block; the product is fp32, rounded once to ``out_dtype``.
    Raises: ValueError for another dtype, or when ``scale`` does not have one byte per 32 columns.
    Source: OCP Microscaling Formats v1.0, 2023.
    """
    dtype = computing(data, scale)
    return rounded(data.to(dtype) * spread(e8m0_values(scale, dtype), data.shape[-1], 32), out_dtype)


@dequantize_mxfp8.check
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> None:
    expect_dtype("data", data, MX_DTYPES)
    expect(data.dim() > 0, "data.shape", "at least one dimension", tuple(data.shape))
    check_block_scale(scale, data, data.shape[-1], 32, E8M0_DTYPES)
    check_choice_of_dtype("out_dtype", out_dtype, FLOATS)


@dequantize_mxfp8.fake
def _(data: Tensor, out_dtype: torch.dtype) -> Tensor:
    return empty(data.shape, data, out_dtype)


@dequantize_mxfp8.trait_values
def _(data: Tensor, out_dtype: torch.dtype) -> dict[str, object]:
    return {"out_dtype": dtype_name(out_dtype), "width": data.shape[-1], "contiguous": data.is_contiguous()}


@dequantize_mxfp8.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    def fp8(*shape: int) -> Tensor:
        return make.randn(shape, torch.float32).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        return make.randint(117, 137, shape, torch.uint8)

    yield Sample("ordinary", data=fp8(7, 64), scale=scales(7, 2), out_dtype=dtype)
    yield Sample("odd", data=fp8(3, 5, 77), scale=scales(3, 5, 3), out_dtype=dtype)
    yield Sample("one", data=fp8(1, 1), scale=scales(1, 1), out_dtype=dtype)
    yield Sample("empty", data=fp8(0, 64), scale=scales(0, 2), out_dtype=dtype)
    yield Sample("transposed", data=fp8(64, 7).t(), scale=scales(2, 7).t(), out_dtype=dtype)
    yield Sample("sliced", data=fp8(7, 96)[:, 5:69], scale=scales(7, 5)[:, 1:3], out_dtype=dtype)
    e8m0 = scales(7, 2).view(torch.float8_e8m0fnu)
    yield Sample("e5m2", data=fp8(7, 64).to(torch.float8_e5m2), scale=e8m0, out_dtype=dtype)


@dequantize_mxfp8.cost
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(bytes=nbytes(data, scale) + data.numel() * out_dtype.itemsize, flops=data.numel())
