"""fused_add_rmsnorm: add to the residual stream, then rmsnorm it, in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, expect_dtype, expect_shape, nbytes, op, wide
from tskernel.ops.norm._math import check_rows, check_weight, normalize_rms


@op(
    mutates=("x", "residual"),
    roles=("x",),
    traits={"hidden": 4096, "contiguous": True},
    shard={"tokens": {"x": 0, "residual": 0}},
)
def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Set ``residual`` to ``x + residual``, rounded to its dtype, then ``x`` to ``rmsnorm(residual)``.

    The functional twin is ``add_rmsnorm``. ``x`` and ``residual`` must not overlap in memory.

    Shapes: ``x [..., H]``, ``residual`` alike, each with its own strides, through which it is written; ``weight [H]``.
    Dtypes: ``x`` and ``residual`` fp32, fp16 or bf16, the same; ``weight`` like ``x`` or fp32; statistics and product
    in fp32, one rounding.
    Raises: ValueError when H is 0, ``residual`` differs from ``x`` in shape or dtype, or ``weight`` does not have H
    elements.
    Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    w = wide(x)
    residual.copy_(x.to(w) + residual.to(w))
    x.copy_(normalize_rms(residual.to(w), weight.to(w), eps))


@fused_add_rmsnorm.check
def _(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    check_rows("x", x)
    expect_shape("residual", residual, x.shape)
    expect_dtype("residual", residual, (x.dtype,))
    check_weight("weight", weight, x)


@fused_add_rmsnorm.trait_values
def _(x: Tensor, residual: Tensor) -> dict[str, object]:
    return {"hidden": x.shape[-1], "contiguous": x.is_contiguous() and residual.is_contiguous()}


@fused_add_rmsnorm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (7, 64), "one": (1, 1), "odd": (3, 5, 769), "empty": (0, 64)}.items():
        x, residual = make.randn(shape, dtype), make.randn(shape, dtype)
        yield Sample(name, x=x, residual=residual, weight=make.randn(shape[-1:], dtype))
    x, residual = make.randn((64, 7), dtype).t(), make.randn((7, 80), dtype)[:, 9:73]
    yield Sample("strided", x=x, residual=residual, weight=make.randn((64,), torch.float32), eps=1e-3)


@fused_add_rmsnorm.cost
def _(x: Tensor, weight: Tensor) -> Cost:
    return Cost(bytes=4 * nbytes(x) + nbytes(weight), flops=5 * x.numel())
