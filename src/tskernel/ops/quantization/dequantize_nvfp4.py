"""dequantize_nvfp4: unpack e2m1 codes, multiply by the e4m3 scale of their block of 16, divide by the global scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import FLOATS, Cost, Make, Sample, empty, expect, expect_dtype, nbytes, op
from tskernel.ops.quantization._checks import check_block_scale, check_choice_of_dtype, check_one_element, dtype_name
from tskernel.ops.quantization._math import computing, fp4_to_fp32, rounded, spread, unpack_nibbles


@op(
    roles=("data",),
    traits={"out_dtype": "bfloat16", "width": 4096, "contiguous": True},
    shard={"tokens": {"data": 0, "scale": 0, "return": 0}},
)
def dequantize_nvfp4(data: Tensor, scale: Tensor, global_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return ``code * scale / global_scale``, the inverse of quantize_nvfp4.

    Shapes: ``data [..., K/2]`` (any strides, low nibble first), ``scale [..., ceil(K/16)]``, ``global_scale`` one
    element (rank 0 or 1) -> ``[..., K]``, contiguous and new.
    Dtypes: ``data`` uint8; ``scale`` float8_e4m3fn (view uint8 storage as such); ``global_scale`` fp32; ``out_dtype``
    fp32, fp16 or bf16.
    Conventions: ``global_scale`` is 448 * 6 / amax, as in FlashInfer and vLLM: a checkpoint that stores its
    reciprocal has to be inverted once at load. The quotient is fp32, rounded once to ``out_dtype``.
    Raises: ValueError for another dtype or shape.
    Source: NVIDIA 2025, Pretraining Large Language Models with NVFP4, https://arxiv.org/abs/2509.25149.
    """
    dtype = computing(scale, global_scale)
    codes = unpack_nibbles(data)
    value = fp4_to_fp32(codes).to(dtype) * spread(scale.to(dtype), codes.shape[-1], 16)
    return rounded(value / global_scale.to(dtype).reshape(()), out_dtype)


@dequantize_nvfp4.check
def _(data: Tensor, scale: Tensor, global_scale: Tensor, out_dtype: torch.dtype) -> None:
    expect_dtype("data", data, (torch.uint8,))
    expect(data.dim() > 0, "data.shape", "at least one dimension", tuple(data.shape))
    check_block_scale(scale, data, data.shape[-1], 8, (torch.float8_e4m3fn,))  # 8 bytes are 16 columns
    check_one_element("global_scale", global_scale)
    check_choice_of_dtype("out_dtype", out_dtype, FLOATS)


@dequantize_nvfp4.fake
def _(data: Tensor, out_dtype: torch.dtype) -> Tensor:
    return empty((*data.shape[:-1], 2 * data.shape[-1]), data, out_dtype)


@dequantize_nvfp4.trait_values
def _(data: Tensor, out_dtype: torch.dtype) -> dict[str, object]:
    return {"out_dtype": dtype_name(out_dtype), "width": 2 * data.shape[-1], "contiguous": data.is_contiguous()}


@dequantize_nvfp4.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    def packed(*shape: int) -> Tensor:
        return make.randint(0, 256, shape, torch.uint8)

    def scales(*shape: int) -> Tensor:
        return (make.randn(shape, torch.float32).abs() * 100).to(torch.float8_e4m3fn)

    g = make.randn((1,), torch.float32).abs() + 10
    yield Sample("ordinary", data=packed(7, 32), scale=scales(7, 4), global_scale=g, out_dtype=dtype)
    yield Sample("odd", data=packed(3, 5, 39), scale=scales(3, 5, 5), global_scale=g[0], out_dtype=dtype)
    yield Sample("one", data=packed(1, 1), scale=scales(1, 1), global_scale=g, out_dtype=dtype)
    yield Sample("empty", data=packed(0, 32), scale=scales(0, 4), global_scale=g, out_dtype=dtype)
    yield Sample("transposed", data=packed(32, 7).t(), scale=scales(4, 7).t(), global_scale=g, out_dtype=dtype)
    yield Sample("sliced", data=packed(7, 48)[:, 5:37], scale=scales(7, 9)[:, 1:5], global_scale=g, out_dtype=dtype)


@dequantize_nvfp4.cost
def _(data: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(bytes=nbytes(data, scale) + 2 * data.numel() * out_dtype.itemsize, flops=4 * data.numel())
