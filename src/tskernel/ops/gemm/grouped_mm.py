"""grouped_mm: one matrix product per group of consecutive rows, dense or quantized."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.dispatch.signature import TensorFormat
from tskernel.library import Cost, Make, Sample, empty, expect, expect_dim, expect_dtype, expect_shape, nbytes, op
from tskernel.ops.gemm._checks import check_epilogue, check_operands
from tskernel.ops.gemm._operands import columns_of, plain_operands, result_dtype
from tskernel.ops.gemm._samples import quantized_pairs, whole_blocks
from tskernel.ops.quantization._math import rounded


@op(
    out=True,
    roles=("a", "b"),
    traits={"quant": "none", "bias": False, "alpha": False, "k": 4096, "n": 4096, "experts": 128, "contiguous": True},
    shard={"columns": {"b": 1, "b_scale": 1, "bias": -1, "return": 1}},
    autocast=("a", "b"),
)
def grouped_mm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    quant: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return, for the rows of group e, ``alpha[e] * (a @ b[e]^T) + bias[e]``.

    Shapes: ``a [T, K]``, ``b [E, N, K]`` (any strides), ``offsets [E]``, ``bias [N]`` or ``[E, N]``, ``alpha`` one
    element (rank 0 or 1) or ``[E]`` -> ``[T, N]``. Scales as in mm, those of ``b`` with a leading E; for "fp8_tensor"
    ``b_scale`` has one element or ``[E]``.
    Dtypes: ``offsets`` int32, the rest as in mm. Result: ``out_dtype``, by default that of a 16- or 32-bit ``a``,
    else bf16.
    Conventions: ``offsets`` are the ends of the groups, cumulative, as in torch's grouped_mm: group e is rows
    ``offsets[e-1] .. offsets[e] - 1``, the first from 0; a group may be empty. Rows from ``offsets[-1]`` on give 0
    and may hold anything; matrices of empty groups do not matter. Products and sums in fp32, one rounding.
    Raises: ValueError for dtypes, a K or scales that do not fit ``quant``, or no group.
    Source: Gale et al. 2022 (MegaBlocks), https://arxiv.org/abs/2211.15841.
    """
    x, w = plain_operands(a, b, a_scale, b_scale, quant)
    row = torch.arange(a.shape[0], device=a.device)
    group = (row.unsqueeze(1) >= offsets).sum(1)  # how many groups end at or before the row
    used = (group < b.shape[0]).unsqueeze(1)
    group = group.clamp(max=b.shape[0] - 1)
    # Every row meets every matrix and keeps one product: E times the work, but no copy of a matrix per row.
    y = (x.unsqueeze(0) @ w.mT)[group, row]
    if alpha is not None:
        y = y * alpha.to(y.dtype).expand(b.shape[0])[group].unsqueeze(1)
    if bias is not None:
        y = y + bias.to(y.dtype).expand(b.shape[0], -1)[group]
    return rounded(torch.where(used, y, 0.0), result_dtype(a, out_dtype))


@grouped_mm.check
def _(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor | None,
    quant: str,
    out_dtype: torch.dtype | None,
) -> None:
    expect_dim("a", a, 2)
    expect_dim("b", b, 3)
    expect(b.shape[0] > 0, "b.shape", "at least one group", tuple(b.shape))
    expect_dtype("offsets", offsets, (torch.int32,))
    expect_shape("offsets", offsets, (b.shape[0],))
    check_operands(a, b, a_scale, b_scale, quant)
    check_epilogue(b.shape[1], [b.shape[0]], bias, alpha, out_dtype)


@grouped_mm.fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return empty((a.shape[0], b.shape[1]), a, result_dtype(a, out_dtype))


@grouped_mm.format_signature
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> dict[str, TensorFormat]:
    dtypes = {"a": a.dtype, "b": b.dtype, "out": result_dtype(a, out_dtype)}
    return {role: TensorFormat(dtype) for role, dtype in dtypes.items()}


@grouped_mm.trait_values
def _(a: Tensor, b: Tensor, bias: Tensor | None, alpha: Tensor | None, quant: str) -> dict[str, object]:
    return {
        "quant": quant,
        "bias": bias is not None,
        "alpha": alpha is not None,
        "k": columns_of(a, quant),
        "n": b.shape[1],
        "experts": b.shape[0],
        "contiguous": a.is_contiguous() and b.is_contiguous(),
    }


@grouped_mm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, (n, k, ends, rows) in {
        "ordinary": (24, 64, [3, 3, 8, 12], 12),
        "one": (1, 1, [1], 1),
        "odd": (5, 77, [1, 6, 6, 10, 17], 17),
        "spare_rows": (24, 64, [0, 2, 5], 9),
        "no_rows": (16, 64, [0, 0], 0),
        "no_used_row": (16, 64, [0, 0], 3),
        "no_columns": (0, 64, [2, 4], 4),
        "no_depth": (16, 0, [2, 4], 4),
    }.items():
        a, b = make.randn((rows, k), dtype), make.randn((len(ends), n, k), dtype)
        yield Sample(name, a=a, b=b, offsets=make.tensor(ends, torch.int32))
    a, b, offsets = make.randn((9, 64), dtype), make.randn((3, 24, 64), dtype), make.tensor([4, 4, 8], torch.int32)
    alpha = make.rand((3,), torch.float32)
    yield Sample("bias", a=a, b=b, offsets=offsets, bias=make.randn((3, 24), dtype))
    yield Sample("shared_bias", a=a, b=b, offsets=offsets, bias=make.randn((24,), dtype), alpha=alpha[0])
    yield Sample("alpha", a=a, b=b, offsets=offsets, alpha=alpha, out_dtype=torch.float32)
    yield Sample("transposed", a=make.randn((64, 9), dtype).t(), b=make.randn((3, 64, 24), dtype).mT, offsets=offsets)
    yield Sample(
        "sliced", a=make.randn((9, 96), dtype)[:, 8:72], b=make.randn((5, 24, 64), dtype)[1:4], offsets=offsets
    )
    yield Sample("fp8_block_whole", **whole_blocks(make, 9, 192, 256, (3,)), offsets=offsets)
    for name, pair in quantized_pairs(make, 9, 24, 160, dtype, (), (3,)):
        bias = make.randn((3, 24), torch.float32)
        yield Sample(name, **pair, offsets=offsets, alpha=alpha, bias=bias)


@grouped_mm.cost
def _(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, quant: str) -> Cost:
    entries = a.shape[0] * b.shape[1]
    return Cost(bytes=nbytes(a, b, a_scale, b_scale) + 2 * entries, flops=2 * entries * columns_of(a, quant))
