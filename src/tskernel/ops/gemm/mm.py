"""mm: matrix product with a transposed weight, dense or quantized."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.dispatch.signature import TensorFormat
from tskernel.library import Cost, Make, Sample, empty, expect_dim, nbytes, op
from tskernel.ops.gemm._checks import check_epilogue, check_operands
from tskernel.ops.gemm._operands import columns_of, plain_operands, result_dtype
from tskernel.ops.gemm._samples import quantized_pairs, whole_blocks
from tskernel.ops.quantization._math import rounded


@op(
    out=True,
    roles=("a", "b"),
    traits={"quant": "none", "bias": False, "alpha": False, "k": 4096, "n": 4096, "contiguous": True},
    shard={
        "rows": {"a": 0, "a_scale": 0, "return": 0},
        "columns": {"b": 0, "b_scale": 0, "bias": 0, "return": 1},
        "contraction": {"a": 1, "b": 1, "a_scale": 1, "b_scale": 1, "bias": "absent", "return": "partial"},
    },
    autocast=("a", "b"),
)
def mm(
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
    """Return ``alpha * (a @ b^T) + bias``, where the scales are part of ``a`` and ``b``.

    Shapes: ``a [M, K]``, ``b [N, K]`` (any strides), ``bias [N]``, ``alpha`` one element (rank 0 or 1) -> ``[M, N]``.
    Scales by ``quant``; the last block may be partial, unless said otherwise: "none" takes none; "fp8_tensor" one
    element each; "fp8_token" and "int8" ``a_scale [M]`` or ``[M, 1]``, ``b_scale [N]`` or ``[N, 1]``; "fp8_block"
    ``a_scale [M, ceil(K/128)]``, ``b_scale [ceil(N/128), ceil(K/128)]``; "mxfp8" and "mxfp4" ``[M, ceil(K/32)]`` and
    ``[N, ceil(K/32)]``; "nvfp4" ``[M, ceil(K/16)]`` and ``[N, ceil(K/16)]``; "w4a16" ``b_scale [N, G]`` where G
    divides K.
    Dtypes: "none": both fp32, fp16 or bf16 alike; fp8: any float8, fp32 scales; "mxfp8": float8_e4m3fn or
    float8_e5m2; "mxfp4", "nvfp4": uint8 ``[.., K/2]``, low nibble first; mx scales are ue8m0 bytes (uint8 or
    float8_e8m0fnu), nvfp4 scales float8_e4m3fn; "int8": int8, fp32 scales; "w4a16": ``a`` a float, ``b`` uint8 ``[N,
    K/2]``, low nibble first, value = (nibble - 8) * scale, scale a float. ``bias`` a float, ``alpha`` fp32 (a Tensor,
    so that it can come from the device). Result: ``out_dtype``, by default that of a 16- or 32-bit ``a``, else bf16.
    Conventions: any ``quant`` but "none" is weight-only when ``a`` is a float and ``a_scale`` is None. nvfp4's two
    global scales go into ``alpha = 1 / (global_scale_a * global_scale_b)``. Products and sums in fp32, one rounding.
    Raises: ValueError for dtypes, a K or scales that do not fit ``quant``.
    Source: fp8 blocks: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437; mx: OCP Microscaling Formats v1.0, 2023.
    """
    x, w = plain_operands(a, b, a_scale, b_scale, quant)
    y = x @ w.t()
    if alpha is not None:
        y = y * alpha.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return rounded(y, result_dtype(a, out_dtype))


@mm.check
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
    expect_dim("a", a, 2)
    expect_dim("b", b, 2)
    check_operands(a, b, a_scale, b_scale, quant)
    check_epilogue(b.shape[0], [], bias, alpha, out_dtype)


@mm.fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return empty((a.shape[0], b.shape[0]), a, result_dtype(a, out_dtype))


@mm.format_signature
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> dict[str, TensorFormat]:
    dtypes = {"a": a.dtype, "b": b.dtype, "out": result_dtype(a, out_dtype)}
    return {role: TensorFormat(dtype) for role, dtype in dtypes.items()}


@mm.trait_values
def _(a: Tensor, b: Tensor, bias: Tensor | None, alpha: Tensor | None, quant: str) -> dict[str, object]:
    return {
        "quant": quant,
        "bias": bias is not None,
        "alpha": alpha is not None,
        "k": columns_of(a, quant),
        "n": b.shape[0],
        "contiguous": a.is_contiguous() and b.is_contiguous(),
    }


@mm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, (m, n, k) in {
        "ordinary": (7, 24, 64),
        "one": (1, 1, 1),
        "odd": (3, 5, 77),
        "no_rows": (0, 16, 64),
        "no_columns": (4, 0, 64),
        "no_depth": (4, 16, 0),
    }.items():
        yield Sample(name, a=make.randn((m, k), dtype), b=make.randn((n, k), dtype))
    a, b, bias = make.randn((7, 64), dtype), make.randn((24, 64), dtype), make.randn((24,), dtype)
    alpha = make.full((1,), 0.375, torch.float32)
    yield Sample("bias", a=a, b=b, bias=bias)
    yield Sample("fp32_bias_alpha", a=a, b=b, bias=bias.float(), alpha=alpha)
    yield Sample("alpha_fp32_out", a=a, b=b, alpha=alpha[0], out_dtype=torch.float32)
    yield Sample("transposed", a=make.randn((64, 7), dtype).t(), b=make.randn((64, 24), dtype).t(), bias=bias)
    yield Sample("sliced", a=make.randn((7, 96), dtype)[:, 5:69], b=make.randn((24, 80), dtype)[:, :64])
    yield Sample("fp8_block_whole", **whole_blocks(make, 5, 192, 256))
    for name, pair in quantized_pairs(make, 17, 144, 160, dtype):
        yield Sample(name, **pair)
        yield Sample(f"{name}_epilogue", **pair, bias=make.randn((144,), torch.float32), alpha=alpha, out_dtype=dtype)


@mm.cost
def _(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, quant: str) -> Cost:
    m, n = a.shape[0], b.shape[0]
    return Cost(bytes=nbytes(a, b, a_scale, b_scale) + 2 * m * n, flops=2 * m * n * columns_of(a, quant))
