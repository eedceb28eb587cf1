"""quantize_int8: symmetric int8 with measured scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, expect_choice, nbytes, op
from tskernel.ops.quantization._checks import check_rows
from tskernel.ops.quantization._math import INT8_MAX, fp8_scale, row_amax, tensor_amax

GRANULARITIES = ("token", "tensor")


@op(
    roles=("x",),
    traits={"granularity": "token", "width": 4096, "contiguous": True},
)
def quantize_int8(x: Tensor, *, granularity: str = "token") -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to int8 with scales of its own absolute maxima; ``value = data * scale``.

    Shapes: ``x [..., K]`` (any strides) -> data ``[..., K]`` and scale: "token", a row of ``x``, also the output
    channel of a weight ``[N, K]``, ``[..., 1]``; "tensor" ``[1]``. Both contiguous and new.
    Dtypes: ``x`` fp32, fp16 or bf16; data int8; scale fp32.
    Conventions: scale = amax / 127, at least 2^-126; data = x / scale rounded once, ties to even, in [-127, 127]
    (-128 is not used, so that negation is exact). NaN gives 0, as int8 has no NaN, and does not take part in a
    maximum; infinities saturate.
    Raises: ValueError when ``x`` has no column, or for another granularity.
    Source: Xiao et al. 2022 (SmoothQuant, per-token dynamic scales), https://arxiv.org/abs/2211.10438.
    """
    scale = fp8_scale(row_amax(x) if granularity == "token" else tensor_amax(x), INT8_MAX)
    quotient = torch.nan_to_num(x.to(torch.float32) / scale, nan=0.0)
    return quotient.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8).contiguous(), scale.contiguous()


@quantize_int8.check
def _(x: Tensor, granularity: str) -> None:
    check_rows(x)
    expect_choice("granularity", granularity, GRANULARITIES)


@quantize_int8.fake
def _(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], 1) if granularity == "token" else (1,)
    return empty(x.shape, x, torch.int8), empty(shape, x, torch.float32)


@quantize_int8.trait_values
def _(x: Tensor, granularity: str) -> dict[str, object]:
    return {"granularity": granularity, "width": x.shape[-1], "contiguous": x.is_contiguous()}


@quantize_int8.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for granularity in GRANULARITIES:
        for name, shape in {"ordinary": (7, 64), "one": (1, 1), "odd": (3, 5, 77), "empty": (0, 64)}.items():
            yield Sample(f"{granularity}_{name}", x=make.randn(shape, dtype), granularity=granularity)
    yield Sample("transposed", x=make.randn((64, 7), dtype).t())
    yield Sample("sliced", x=make.randn((7, 96), dtype)[:, 5:69], granularity="tensor")


@quantize_int8.cost
def _(x: Tensor) -> Cost:
    return Cost(bytes=nbytes(x) + x.numel(), flops=3 * x.numel())
