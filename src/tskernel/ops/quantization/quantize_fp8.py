"""quantize_fp8: divide by a given scale and round to fp8."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op
from tskernel.ops.quantization._checks import FP8_DTYPES, check_choice_of_dtype, check_row_scale, check_rows, dtype_name
from tskernel.ops.quantization._math import FP32_TINY, saturate_to_fp8


@op(
    roles=("x",),
    traits={"granularity": "tensor", "dtype": "float8_e4m3fn", "width": 4096, "contiguous": True},
    shard={"tokens": {"x": 0, "scale": 0, "return": 0, "return1": 0}},
)
def quantize_fp8(x: Tensor, scale: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return ``x / scale`` in fp8 and a copy of ``scale``; ``value = data * scale``.

    Shapes: ``x [..., K]`` (any strides), ``scale`` one element (rank 0 or 1) or one per row ``[..., 1]``
    -> data ``[..., K]``, scale as given; both contiguous and new.
    Dtypes: ``x`` fp32, fp16 or bf16; ``scale`` fp32, positive; data ``dtype``: float8_e4m3fn (None), float8_e4m3fnuz
    or a float8_e5m2 form.
    Conventions: the quotient is fp32, rounded once, ties to even, and saturates: 448, 240 or 57344 for any larger
    value, infinities included. NaN stays NaN; finite input never becomes NaN: a scale below 2^-126, zero too, divides
    as 2^-126.
    Raises: ValueError when ``x`` has no column, or ``scale`` has another shape.
    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433.
    """
    quotient = x.to(torch.float32) / scale.to(torch.float32).clamp(min=FP32_TINY)
    return saturate_to_fp8(quotient, dtype or torch.float8_e4m3fn).contiguous(), scale.to(
        torch.float32, copy=True
    ).contiguous()


@quantize_fp8.check
def _(x: Tensor, scale: Tensor, dtype: torch.dtype | None) -> None:
    check_rows(x)
    check_row_scale(scale, x)
    check_choice_of_dtype("dtype", dtype, FP8_DTYPES)


@quantize_fp8.fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return empty(x.shape, x, dtype or torch.float8_e4m3fn), empty(scale.shape, scale)


@quantize_fp8.trait_values
def _(x: Tensor, scale: Tensor, dtype: torch.dtype | None) -> dict[str, object]:
    return {
        "granularity": "tensor" if scale.dim() <= 1 else "token",
        "dtype": dtype_name(dtype or torch.float8_e4m3fn),
        "width": x.shape[-1],
        "contiguous": x.is_contiguous(),
    }


@quantize_fp8.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (7, 64), "one": (1, 1), "odd": (3, 5, 77), "empty": (0, 64), "flat": (33,)}.items():
        yield Sample(name, x=make.randn(shape, dtype), scale=make.randn((1,), torch.float32).abs() + 0.01)
    x = make.randn((64, 7), dtype).t()
    rows = make.randn((7, 1), torch.float32).abs() + 0.01
    yield Sample("transposed", x=x, scale=rows)
    yield Sample("sliced", x=make.randn((7, 96), dtype)[:, 5:69], scale=rows.reshape(-1)[0])
    yield Sample("e4m3fnuz", x=x * 300, scale=rows, dtype=torch.float8_e4m3fnuz)
    yield Sample("e5m2", x=x * 300, scale=rows, dtype=torch.float8_e5m2)


@quantize_fp8.cost
def _(x: Tensor, scale: Tensor) -> Cost:
    return Cost(bytes=nbytes(x) + x.numel() + 2 * nbytes(scale), flops=x.numel())
