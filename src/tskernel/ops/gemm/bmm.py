"""bmm: a batch of matrix products with transposed weights, dense or quantized."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.dispatch.signature import TensorFormat
from tskernel.library import Cost, Make, Sample, empty, expect_dim, expect_shape, nbytes, op
from tskernel.ops.gemm._checks import check_epilogue, check_operands
from tskernel.ops.gemm._operands import columns_of, plain_operands, result_dtype
from tskernel.ops.gemm._samples import quantized_pairs
from tskernel.ops.quantization._math import rounded


@op(
    out=True,
    roles=("a", "b"),
    traits={"quant": "none", "bias": False, "alpha": False, "k": 512, "n": 128, "contiguous": True},
    shard={"batch": {"a": 0, "b": 0, "a_scale": 0, "b_scale": 0, "bias": -2, "alpha": 0, "return": 0}},
    autocast=("a", "b"),
)
def bmm(
    a: Tensor,
    b: Tensor,
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    quant: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``alpha * (a @ b^T) + bias`` for each matrix of a batch.

    Shapes: ``a [B, M, K]``, ``b [B, N, K]`` (any strides), ``bias [N]`` or ``[B, N]``, ``alpha`` one element (rank 0
    or 1) or ``[B]`` -> ``[B, M, N]``. Scales as in mm with a leading B; for "fp8_tensor" one element or ``[B]``.
    Dtypes: as in mm, for every ``quant``. Result: ``out_dtype``, by default that of a 16- or 32-bit ``a``, else bf16.
    Conventions: as in mm; products and sums in fp32, one rounding.
    Raises: ValueError for another batch size, or dtypes, a K or scales that do not fit ``quant``.
    Source: as mm; the batched form serves the absorbed projections of MLA, https://arxiv.org/abs/2405.04434.
    """
    x, w = plain_operands(a, b, a_scale, b_scale, quant)
    y = x @ w.mT
    if alpha is not None:
        y = y * alpha.to(y.dtype).reshape(-1, 1, 1)
    if bias is not None:
        y = y + (bias if bias.dim() == 1 else bias.unsqueeze(1)).to(y.dtype)
    return rounded(y, result_dtype(a, out_dtype))


@bmm.check
def _(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor | None,
    quant: str,
    out_dtype: torch.dtype | None,
) -> None:
    expect_dim("a", a, 3)
    expect_shape("b", b, (a.shape[0], None, None))
    check_operands(a, b, a_scale, b_scale, quant)
    check_epilogue(b.shape[1], [b.shape[0]], bias, alpha, out_dtype)


@bmm.fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return empty((a.shape[0], a.shape[1], b.shape[1]), a, result_dtype(a, out_dtype))


@bmm.format_signature
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> dict[str, TensorFormat]:
    dtypes = {"a": a.dtype, "b": b.dtype, "out": result_dtype(a, out_dtype)}
    return {role: TensorFormat(dtype) for role, dtype in dtypes.items()}


@bmm.trait_values
def _(a: Tensor, b: Tensor, bias: Tensor | None, alpha: Tensor | None, quant: str) -> dict[str, object]:
    return {
        "quant": quant,
        "bias": bias is not None,
        "alpha": alpha is not None,
        "k": columns_of(a, quant),
        "n": b.shape[1],
        "contiguous": a.is_contiguous() and b.is_contiguous(),
    }


@bmm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, (batch, m, n, k) in {
        "ordinary": (3, 7, 24, 64),
        "one": (1, 1, 1, 1),
        "odd": (2, 3, 5, 77),
        "no_batch": (0, 4, 16, 64),
        "no_rows": (2, 0, 16, 64),
        "no_columns": (2, 4, 0, 64),
        "no_depth": (2, 4, 16, 0),
    }.items():
        yield Sample(name, a=make.randn((batch, m, k), dtype), b=make.randn((batch, n, k), dtype))
    a, b = make.randn((3, 7, 64), dtype), make.randn((3, 24, 64), dtype)
    alpha = make.rand((3,), torch.float32)
    yield Sample("bias", a=a, b=b, bias=make.randn((24,), dtype))
    yield Sample("bias_each", a=a, b=b, bias=make.randn((3, 24), dtype), alpha=alpha)
    yield Sample("alpha", a=a, b=b, alpha=alpha[0], out_dtype=torch.float32)
    heads_inside = make.randn((7, 3, 64), dtype).transpose(0, 1)
    yield Sample("transposed", a=heads_inside, b=make.randn((3, 64, 24), dtype).mT)
    yield Sample("sliced", a=make.randn((3, 7, 96), dtype)[..., 5:69], b=make.randn((5, 24, 64), dtype)[1:4])
    for name, pair in quantized_pairs(make, 5, 24, 160, dtype, (3,), (3,)):
        yield Sample(name, **pair, alpha=alpha, bias=make.randn((3, 24), torch.float32))


@bmm.cost
def _(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, quant: str) -> Cost:
    entries = a.shape[0] * a.shape[1] * b.shape[1]
    return Cost(bytes=nbytes(a, b, a_scale, b_scale) + 2 * entries, flops=2 * entries * columns_of(a, quant))
