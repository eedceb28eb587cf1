"""The second half of the fused activation + fp8 quantization ops: scales, rounding, checks and samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import (
    Cost,
    Make,
    Sample,
    empty,
    expect,
    expect_choice,
    expect_dim,
    expect_dtype,
    expect_shape,
    nbytes,
)
from tskernel.ops.activation._gated import check_gated, empty_half, gated_traits
from tskernel.ops.quantization._math import FP8_MAX, block_amax, fp8_scale, row_amax, saturate_to_fp8, spread

GRANULARITIES = ("tensor", "token", "group")
FP8_DEFAULT = torch.float8_e4m3fn


def quantize_activation(
    y: Tensor, scale: Tensor | None, granularity: str, group_size: int, ue8m0: bool, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Quantize the unrounded activation ``y [..., D]``: by the given scale, or by one per row or group of columns."""
    dtype = dtype or FP8_DEFAULT
    y = y.to(torch.float32)
    if scale is not None:
        return saturate_to_fp8(y / scale, dtype).contiguous(), scale.clone()
    if granularity == "token":
        scale = fp8_scale(row_amax(y), FP8_MAX[dtype], ue8m0)
        return saturate_to_fp8(y / scale, dtype).contiguous(), scale.contiguous()
    scale = fp8_scale(block_amax(y, group_size), FP8_MAX[dtype], ue8m0)
    return saturate_to_fp8(y / spread(scale, y.shape[-1], group_size), dtype).contiguous(), scale.contiguous()


def check_quantize(
    x: Tensor, scale: Tensor | None, granularity: str, group_size: int, ue8m0: bool, dtype: torch.dtype | None
) -> None:
    """Check the input and options of a fused activation and quantization."""
    check_gated(x)
    expect_choice("granularity", granularity, GRANULARITIES)
    expect(group_size > 0, "group_size", "at least 1", group_size)
    names = " or ".join(str(d).removeprefix("torch.") for d in FP8_MAX)
    expect(dtype is None or dtype in FP8_MAX, "dtype", names, dtype)
    if granularity != "tensor":
        expect(scale is None, "scale", f"None with granularity {granularity!r}, which measures it", "a tensor")
        return
    expect(scale is not None, "scale", 'a tensor with granularity "tensor"', "None")
    expect(not ue8m0, "ue8m0", "False with a given scale", ue8m0)
    expect_dtype("scale", scale, (torch.float32,))
    expect_dim("scale", scale, 0, 1)
    if scale is not None and scale.dim() == 1:
        expect_shape("scale", scale, (1,))


def empty_quantized(
    x: Tensor, scale: Tensor | None, granularity: str, group_size: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Allocate data ``[..., D]`` and scale."""
    data = empty_half(x, dtype or FP8_DEFAULT)
    if scale is not None:
        return data, empty(scale.shape, scale)
    columns = 1 if granularity == "token" else (x.shape[-1] // 2 + group_size - 1) // group_size
    return data, empty((*x.shape[:-1], columns), x, torch.float32)


def quantize_traits(
    x: Tensor, granularity: str, group_size: int, ue8m0: bool, dtype: torch.dtype | None
) -> dict[str, object]:
    """Return the traits every fused activation and quantization states."""
    return {
        **gated_traits(x),
        "granularity": granularity,
        "group_size": group_size,
        "ue8m0": ue8m0,
        "dtype": str(dtype or FP8_DEFAULT).removeprefix("torch."),
    }


def quantize_samples(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield inputs of every granularity, of ordinary, smallest, odd and zero size, and strided ones."""
    x = make.randn((5, 320), dtype)
    for granularity in GRANULARITIES:
        scale = make.tensor([0.02], torch.float32) if granularity == "tensor" else None
        options = {"scale": scale, "granularity": granularity}
        yield Sample(granularity, x=x, **options)
        yield Sample(f"{granularity}_odd", x=make.randn((2, 3, 154), dtype), group_size=32, **options)
        yield Sample(f"{granularity}_one", x=make.randn((1, 2), dtype), **options)
        yield Sample(f"{granularity}_empty", x=make.randn((0, 64), dtype), **options)
        yield Sample(f"{granularity}_transposed", x=make.randn((64, 7), dtype).t(), group_size=16, **options)
        if granularity != "tensor":
            yield Sample(f"{granularity}_ue8m0", x=x, ue8m0=True, **options)
    yield Sample("scalar_scale", x=x, scale=make.tensor(0.5, torch.float32), granularity="tensor")
    yield Sample("sliced", x=make.randn((5, 3, 80), dtype)[:, 1:, 7:71])
    yield Sample("e4m3fnuz", x=x, dtype=torch.float8_e4m3fnuz)
    yield Sample("e5m2", x=x, dtype=torch.float8_e5m2)


def quantize_cost(x: Tensor) -> Cost:
    """Count one read of both halves, one byte written per result, and about six operations per result."""
    return Cost(bytes=nbytes(x) + x.numel() // 2, flops=3 * x.numel())
