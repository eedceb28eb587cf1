"""quantize_mxfp8: fp8 elements with one power-of-two scale per 32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op
from tskernel.ops.quantization._checks import MX_DTYPES, ceil_div, check_choice_of_dtype, check_rows, dtype_name
from tskernel.ops.quantization._math import FP8_MAX, block_amax, fp8_scale, saturate_to_fp8, spread, to_e8m0


@op(
    roles=("x",),
    traits={"dtype": "float8_e4m3fn", "width": 4096, "contiguous": True},
    shard={"tokens": {"x": 0, "return": 0, "return1": 0}},
    vmap=("x",),
)
def quantize_mxfp8(x: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to the OCP MXFP8 format: fp8 data and a ue8m0 byte per 32 columns.

    Shapes: ``x [..., K]`` (any strides) -> data ``[..., K]``, scale ``[..., ceil(K/32)]`` in row-major order (not the
    128x4 tiling of tcgen05); the last block may be partial. Both contiguous and new.
    Dtypes: ``x`` fp32, fp16 or bf16; data ``dtype``: float8_e4m3fn (None) or float8_e5m2; scale uint8.
    Conventions: value = data * 2^(byte - 127); the scale is the smallest power of two >= amax / max of the dtype (no
    saturation), between 2^-126 and 2^127; an all-zero block gives zeros and byte 1. NaN does not take part in a
    maximum and stays NaN in the data.
    Raises: ValueError when ``x`` has no column, or for another dtype.
    Source: OCP Microscaling Formats v1.0, 2023; scales rounded up as in Mishra et al. 2025,
    https://arxiv.org/abs/2506.08027.
    """
    dtype = dtype or torch.float8_e4m3fn
    scale = fp8_scale(block_amax(x, 32), FP8_MAX[dtype], ue8m0=True)
    data = saturate_to_fp8(x.to(torch.float32) / spread(scale, x.shape[-1], 32), dtype)
    return data.contiguous(), to_e8m0(scale).contiguous()


@quantize_mxfp8.check
def _(x: Tensor, dtype: torch.dtype | None) -> None:
    check_rows(x)
    check_choice_of_dtype("dtype", dtype, MX_DTYPES)


@quantize_mxfp8.fake
def _(x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    data = empty(x.shape, x, dtype or torch.float8_e4m3fn)
    return data, empty((*x.shape[:-1], ceil_div(x.shape[-1], 32)), x, torch.uint8)


@quantize_mxfp8.trait_values
def _(x: Tensor, dtype: torch.dtype | None) -> dict[str, object]:
    return {
        "dtype": dtype_name(dtype or torch.float8_e4m3fn),
        "width": x.shape[-1],
        "contiguous": x.is_contiguous(),
    }


@quantize_mxfp8.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (7, 64), "one": (1, 1), "odd": (3, 5, 77), "empty": (0, 64), "flat": (33,)}.items():
        yield Sample(name, x=make.randn(shape, dtype))
    yield Sample("transposed", x=make.randn((64, 7), dtype).t())
    yield Sample("sliced", x=make.randn((7, 96), dtype)[:, 5:69])
    yield Sample("e5m2", x=make.randn((7, 64), dtype), dtype=torch.float8_e5m2)


@quantize_mxfp8.cost
def _(x: Tensor) -> Cost:
    return Cost(bytes=nbytes(x) + x.numel() + x.numel() // 32, flops=3 * x.numel())
