"""quantize_fp8_dynamic: measure scales and round to fp8 in one step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, expect, expect_choice, nbytes, op
from tskernel.ops.quantization._checks import (
    FP8_DTYPES,
    GRANULARITIES,
    ceil_div,
    check_choice_of_dtype,
    check_rows,
    dtype_name,
)
from tskernel.ops.quantization._math import (
    FP8_MAX,
    block_amax,
    fp8_scale,
    row_amax,
    saturate_to_fp8,
    spread,
    tensor_amax,
)


@op(
    roles=("x",),
    traits={
        "granularity": "token",
        "group_size": 128,
        "ue8m0": False,
        "dtype": "float8_e4m3fn",
        "width": 4096,
        "contiguous": True,
    },
)
def quantize_fp8_dynamic(
    x: Tensor,
    *,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to fp8 with scales of its own absolute maxima; ``value = data * scale``.

    Shapes: ``x [..., K]`` (any strides) -> data ``[..., K]`` and scale: "tensor" ``[1]``; "token", a row of ``x``,
    also the output channel of a weight ``[N, K]``, ``[..., 1]``; "group" of ``group_size`` columns ``[...,
    ceil(K/group_size)]``; "block" of ``group_size`` rows and columns ``[..., ceil(N/group_size),
    ceil(K/group_size)]``. Last groups and blocks may be partial. All contiguous and new.
    Dtypes: ``x`` fp32, fp16 or bf16; data ``dtype`` as in quantize_fp8; scale fp32.
    Conventions: scale = amax / max of the dtype, at least 2^-126, so that an all-zero group gives zeros and a finite
    scale. ``ue8m0``: the smallest power of two >= amax / max, still in fp32. The data are divided by the returned
    scale, rounded once and saturated. NaN does not take part in a maximum and stays NaN in the data; an infinity
    counts as the largest fp32 number.
    Raises: ValueError for another granularity, ``group_size`` < 1, ``x`` without columns, or "block" with fewer than
    two dimensions.
    Source: DeepSeek-AI 2024 (groups 1x128, blocks 128x128), https://arxiv.org/abs/2412.19437; ue8m0 as in DeepGEMM.
    """
    dtype = dtype or torch.float8_e4m3fn
    fmax = FP8_MAX[dtype]
    columns = x.shape[-1]
    if granularity == "tensor":
        scale = fp8_scale(tensor_amax(x), fmax, ue8m0)
        each = scale
    elif granularity == "token":
        scale = fp8_scale(row_amax(x), fmax, ue8m0)
        each = scale
    elif granularity == "group":
        scale = fp8_scale(block_amax(x, group_size), fmax, ue8m0)
        each = spread(scale, columns, group_size)
    else:
        amax = block_amax(block_amax(x, group_size).mT, group_size).mT
        scale = fp8_scale(amax, fmax, ue8m0)
        each = spread(spread(scale, x.shape[-2], group_size, -2), columns, group_size)
    return saturate_to_fp8(x.to(torch.float32) / each, dtype).contiguous(), scale.contiguous()


@quantize_fp8_dynamic.check
def _(x: Tensor, granularity: str, group_size: int, dtype: torch.dtype | None) -> None:
    check_rows(x)
    expect_choice("granularity", granularity, GRANULARITIES)
    if granularity == "block":
        expect(x.dim() >= 2, "x.shape", "at least two dimensions for blocks", tuple(x.shape))
    expect(group_size > 0, "group_size", "at least 1", group_size)
    check_choice_of_dtype("dtype", dtype, FP8_DTYPES)


@quantize_fp8_dynamic.fake
def _(x: Tensor, granularity: str, group_size: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    *lead, columns = x.shape
    if granularity == "tensor":
        shape = [1]
    elif granularity == "token":
        shape = [*lead, 1]
    elif granularity == "group":
        shape = [*lead, ceil_div(columns, group_size)]
    else:
        shape = [*lead[:-1], ceil_div(lead[-1], group_size), ceil_div(columns, group_size)]
    return empty(x.shape, x, dtype or torch.float8_e4m3fn), empty(shape, x, torch.float32)


@quantize_fp8_dynamic.trait_values
def _(x: Tensor, granularity: str, group_size: int, ue8m0: bool, dtype: torch.dtype | None) -> dict[str, object]:
    return {
        "granularity": granularity,
        "group_size": group_size,
        "ue8m0": ue8m0,
        "dtype": dtype_name(dtype or torch.float8_e4m3fn),
        "width": x.shape[-1],
        "contiguous": x.is_contiguous(),
    }


@quantize_fp8_dynamic.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    x = make.randn((5, 160), dtype)
    for granularity in GRANULARITIES:
        yield Sample(granularity, x=x, granularity=granularity)
        yield Sample(f"{granularity}_ue8m0", x=x * 100, granularity=granularity, ue8m0=True)
        yield Sample(f"{granularity}_odd", x=make.randn((2, 3, 77), dtype), granularity=granularity, group_size=32)
        yield Sample(f"{granularity}_empty", x=make.randn((0, 64), dtype), granularity=granularity)
        yield Sample(
            f"{granularity}_transposed", x=make.randn((64, 7), dtype).t(), granularity=granularity, group_size=16
        )
    yield Sample("one", x=make.randn((1, 1), dtype))
    yield Sample("sliced", x=make.randn((7, 96), dtype)[:, 5:69])
    yield Sample("zero_row", x=x * (make.randn((5, 1), dtype) > 0), granularity="token")
    yield Sample("e4m3fnuz", x=x, dtype=torch.float8_e4m3fnuz)
    yield Sample("e5m2", x=x, dtype=torch.float8_e5m2)


@quantize_fp8_dynamic.cost
def _(x: Tensor) -> Cost:
    return Cost(bytes=nbytes(x) + x.numel(), flops=3 * x.numel())
