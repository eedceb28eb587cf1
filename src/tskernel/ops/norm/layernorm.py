"""layernorm: shift rows to zero mean and scale them to unit variance."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op, wide
from tskernel.ops.norm._math import check_rows, check_weight, normalize_rms


@op(
    out=True,
    roles=("x",),
    traits={"hidden": 4096, "contiguous": True, "bias": True},
    shard={"tokens": {"x": 0, "return": 0}},
    vmap=("x",),
)
def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Subtract each row's mean, divide by its standard deviation, multiply by ``weight`` and add ``bias``.

    The variance is the biased one (divided by H), of the deviations from the mean, plus ``eps``.

    Shapes: ``x [..., H]`` (any strides), ``weight [H]``, ``bias [H]`` -> ``[..., H]``, contiguous, never aliasing
    ``x``.
    Dtypes: ``x`` fp32, fp16 or bf16; ``weight`` and ``bias`` like ``x`` or fp32; all in fp32, one rounding.
    Raises: ValueError when H is 0, or ``weight`` or ``bias`` does not have H elements.
    Source: Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450.
    """
    w = wide(x)
    h = x.to(w)
    h = normalize_rms(h - h.mean(-1, keepdim=True), weight.to(w), eps)
    h = h if bias is None else h + bias.to(w)
    return h.to(x.dtype).contiguous()


@layernorm.check
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_rows("x", x)
    check_weight("weight", weight, x)
    check_weight("bias", bias, x)


@layernorm.fake
def _(x: Tensor) -> Tensor:
    return empty(x.shape, x)


@layernorm.trait_values
def _(x: Tensor, bias: Tensor | None) -> dict[str, object]:
    return {"hidden": x.shape[-1], "contiguous": x.is_contiguous(), "bias": bias is not None}


@layernorm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (7, 64), "one": (1, 1), "odd": (3, 5, 769), "empty": (0, 64)}.items():
        weight, bias = make.randn(shape[-1:], dtype), make.randn(shape[-1:], dtype)
        yield Sample(name, x=make.randn(shape, dtype), weight=weight, bias=bias)
    yield Sample("no_bias", x=make.randn((64, 7), dtype).t(), weight=make.randn((64,), dtype), eps=1e-3)
    fp32 = {"weight": make.randn((64,), torch.float32), "bias": make.randn((64,), torch.float32)}
    yield Sample("sliced", x=make.randn((5, 3, 80), dtype)[:, 1:, 7:71], **fp32)


@layernorm.cost
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(weight, bias), flops=8 * x.numel())
