"""add_rmsnorm: add to the residual stream, then rmsnorm it, into fresh tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, expect_dtype, expect_shape, nbytes, op, wide
from tskernel.ops.norm._math import check_rows, check_weight, normalize_rms


@op(
    roles=("x",),
    traits={"hidden": 4096, "contiguous": True},
    shard={"tokens": {"x": 0, "residual": 0, "return": 0, "return1": 0}},
    vmap=("x", "residual"),
)
def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return ``(rmsnorm(s), s)`` where ``s = x + residual``, rounded to the dtype of ``x``.

    The norm is taken of the rounded sum, so the result equals an addition followed by ``rmsnorm``. The functional
    twin of ``fused_add_rmsnorm``.

    Shapes: ``x [..., H]``, ``residual`` alike, each with any strides, ``weight [H]`` -> two ``[..., H]``, contiguous,
    never aliasing an argument.
    Dtypes: ``x`` and ``residual`` fp32, fp16 or bf16, the same; ``weight`` like ``x`` or fp32; statistics and product
    in fp32, one rounding.
    Raises: ValueError when H is 0, ``residual`` differs from ``x`` in shape or dtype, or ``weight`` does not have H
    elements.
    Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    w = wide(x)
    total = (x.to(w) + residual.to(w)).to(x.dtype).contiguous()
    return normalize_rms(total.to(w), weight.to(w), eps).to(x.dtype), total


@add_rmsnorm.check
def _(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    check_rows("x", x)
    expect_shape("residual", residual, x.shape)
    expect_dtype("residual", residual, (x.dtype,))
    check_weight("weight", weight, x)


@add_rmsnorm.fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return empty(x.shape, x), empty(x.shape, x)


@add_rmsnorm.trait_values
def _(x: Tensor, residual: Tensor) -> dict[str, object]:
    return {"hidden": x.shape[-1], "contiguous": x.is_contiguous() and residual.is_contiguous()}


@add_rmsnorm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (7, 64), "one": (1, 1), "odd": (3, 5, 769), "empty": (0, 64)}.items():
        x, residual = make.randn(shape, dtype), make.randn(shape, dtype)
        yield Sample(name, x=x, residual=residual, weight=make.randn(shape[-1:], dtype))
    x, residual = make.randn((64, 7), dtype).t(), make.randn((7, 80), dtype)[:, 9:73]
    yield Sample("strided", x=x, residual=residual, weight=make.randn((64,), torch.float32), eps=1e-3)


@add_rmsnorm.cost
def _(x: Tensor, weight: Tensor) -> Cost:
    return Cost(bytes=4 * nbytes(x) + nbytes(weight), flops=5 * x.numel())
