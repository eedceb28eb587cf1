"""dequantize_mxfp4: unpack e2m1 codes and multiply by the power-of-two scale of their block of 32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import FLOATS, Cost, Make, Sample, empty, expect, expect_dtype, nbytes, op
from tskernel.ops.quantization._checks import E8M0_DTYPES, check_block_scale, check_choice_of_dtype, dtype_name
from tskernel.ops.quantization._math import computing, e8m0_values, fp4_to_fp32, rounded, spread, unpack_nibbles


@op(
    roles=("data",),
    traits={"out_dtype": "bfloat16", "width": 4096, "contiguous": True},
    shard={"tokens": {"data": 0, "scale": 0, "return": 0}},
)
def dequantize_mxfp4(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return ``code * 2^(byte - 127)``, the inverse of quantize_mxfp4.

    Shapes: ``data [..., K/2]`` (any strides, low nibble first), ``scale [..., ceil(K/32)]`` -> ``[..., K]``,
    contiguous and new.
    Dtypes: ``data`` uint8; ``scale`` uint8 or float8_e8m0fnu, read alike; ``out_dtype`` fp32, fp16 or bf16.
    Conventions: codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and bit 3 is the sign; byte 255 is NaN for its whole block;
    the product is fp32, rounded once to ``out_dtype``.
    Raises: ValueError for another dtype, or when ``scale`` does not have one byte per 32 columns.
    Source: OCP Microscaling Formats v1.0, 2023.
    """
    dtype = computing(scale)
    codes = unpack_nibbles(data)
    return rounded(fp4_to_fp32(codes).to(dtype) * spread(e8m0_values(scale, dtype), codes.shape[-1], 32), out_dtype)


@dequantize_mxfp4.check
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> None:
    expect_dtype("data", data, (torch.uint8,))
    expect(data.dim() > 0, "data.shape", "at least one dimension", tuple(data.shape))
    check_block_scale(scale, data, data.shape[-1], 16, E8M0_DTYPES)  # 16 bytes are 32 columns
    check_choice_of_dtype("out_dtype", out_dtype, FLOATS)


@dequantize_mxfp4.fake
def _(data: Tensor, out_dtype: torch.dtype) -> Tensor:
    return empty((*data.shape[:-1], 2 * data.shape[-1]), data, out_dtype)


@dequantize_mxfp4.trait_values
def _(data: Tensor, out_dtype: torch.dtype) -> dict[str, object]:
    return {"out_dtype": dtype_name(out_dtype), "width": 2 * data.shape[-1], "contiguous": data.is_contiguous()}


@dequantize_mxfp4.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    def packed(*shape: int) -> Tensor:
        return make.randint(0, 256, shape, torch.uint8)

    def scales(*shape: int) -> Tensor:
        return make.randint(117, 137, shape, torch.uint8)

    yield Sample("ordinary", data=packed(7, 32), scale=scales(7, 2), out_dtype=dtype)
    yield Sample("odd", data=packed(3, 5, 39), scale=scales(3, 5, 3), out_dtype=dtype)
    yield Sample("one", data=packed(1, 1), scale=scales(1, 1), out_dtype=dtype)
    yield Sample("empty", data=packed(0, 32), scale=scales(0, 2), out_dtype=dtype)
    yield Sample("transposed", data=packed(32, 7).t(), scale=scales(2, 7).t(), out_dtype=dtype)
    yield Sample("sliced", data=packed(7, 48)[:, 5:37], scale=scales(7, 5)[:, 1:3], out_dtype=dtype)
    yield Sample("e8m0", data=packed(7, 32), scale=scales(7, 2).view(torch.float8_e8m0fnu), out_dtype=dtype)


@dequantize_mxfp4.cost
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(bytes=nbytes(data, scale) + 2 * data.numel() * out_dtype.itemsize, flops=2 * data.numel())
