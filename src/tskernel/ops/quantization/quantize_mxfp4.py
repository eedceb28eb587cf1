"""quantize_mxfp4: packed e2m1 elements with one power-of-two scale per 32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op
from tskernel.ops.quantization._checks import ceil_div, check_even_rows
from tskernel.ops.quantization._math import (
    FP4_MAX,
    block_amax,
    block_has_nan,
    fp8_scale,
    pack_nibbles,
    round_to_fp4,
    spread,
    to_e8m0,
)


@op(
    roles=("x",),
    traits={"width": 4096, "contiguous": True},
    shard={"tokens": {"x": 0, "return": 0, "return1": 0}},
    vmap=("x",),
)
def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to the OCP MXFP4 format: two e2m1 codes per byte and a ue8m0 byte per 32 columns.

    Shapes: ``x [..., K]`` (any strides, K even) -> data ``[..., K/2]`` (low nibble first), scale ``[...,
    ceil(K/32)]`` in row-major order; the last block may be partial. Both contiguous and new.
    Dtypes: ``x`` fp32, fp16 or bf16; data and scale uint8.
    Conventions: value = code * 2^(byte - 127), codes 0..7 being 0, 0.5, 1, 1.5, 2, 3, 4, 6 and bit 3 the sign; ties
    go to the even code. The scale is the smallest power of two >= amax / 6 (no saturation), between 2^-126 and 2^127;
    an all-zero block gives zeros and byte 1. e2m1 has no NaN: a block that holds one gets byte 255 and reads as NaN
    throughout.
    Raises: ValueError when K is 0 or odd.
    Source: OCP Microscaling Formats v1.0, 2023.
    """
    scale = fp8_scale(block_amax(x, 32), FP4_MAX, ue8m0=True)
    code = round_to_fp4(x.to(torch.float32) / spread(scale, x.shape[-1], 32))
    byte = torch.where(block_has_nan(x, 32), 255, to_e8m0(scale))
    return pack_nibbles(code).contiguous(), byte.contiguous()


@quantize_mxfp4.check
def _(x: Tensor) -> None:
    check_even_rows(x)


@quantize_mxfp4.fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    *lead, columns = x.shape
    return empty((*lead, columns // 2), x, torch.uint8), empty((*lead, ceil_div(columns, 32)), x, torch.uint8)


@quantize_mxfp4.trait_values
def _(x: Tensor) -> dict[str, object]:
    return {"width": x.shape[-1], "contiguous": x.is_contiguous()}


@quantize_mxfp4.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {
        "ordinary": (7, 64),
        "pair": (1, 2),
        "odd": (3, 5, 78),
        "empty": (0, 64),
        "flat": (34,),
    }.items():
        yield Sample(name, x=make.randn(shape, dtype))
    yield Sample("transposed", x=make.randn((64, 7), dtype).t())
    yield Sample("sliced", x=make.randn((7, 96), dtype)[:, 5:69])


@quantize_mxfp4.cost
def _(x: Tensor) -> Cost:
    return Cost(bytes=nbytes(x) + x.numel() // 2 + x.numel() // 32, flops=4 * x.numel())
