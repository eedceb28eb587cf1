"""The operands of a GEMM in every quantization: what the stored numbers mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tskernel.ops.quantization._math import computing, e8m0_values, fp4_to_fp32, spread, unpack_nibbles

QUANTS = ("none", "fp8_tensor", "fp8_token", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int8", "w4a16")
PACKED = ("mxfp4", "nvfp4", "w4a16")
BLOCK = 128  # fp8_block: rows of a by 1 x 128, b by 128 x 128
W4_ZERO_POINT = 8


class Operands(NamedTuple):
    """Both operands as plain numbers, ``a [..., M, K]`` and ``b [..., N, K]``."""

    a: Tensor
    b: Tensor


def plain_operands(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, quant: str) -> Operands:
    """Return both operands with their scales multiplied in, in fp32 (float64 for the oracle)."""
    dtype = computing(a, b, a_scale, b_scale)
    left = a.to(dtype) if a_scale is None else _scaled(a, a_scale, quant, dtype, weight=False)
    right = b.to(dtype) if b_scale is None else _scaled(b, b_scale, quant, dtype, weight=True)
    return Operands(left, right)


def _scaled(x: Tensor, scale: Tensor, quant: str, dtype: torch.dtype, *, weight: bool) -> Tensor:
    if quant == "w4a16":
        codes = unpack_nibbles(x).to(dtype) - W4_ZERO_POINT
        groups = scale.shape[-1]
        grouped = codes.unflatten(-1, (groups, codes.shape[-1] // groups))
        return (grouped * scale.to(dtype).unsqueeze(-1)).flatten(-2)
    values = fp4_to_fp32(unpack_nibbles(x)).to(dtype) if quant in PACKED else x.to(dtype)
    return values * _each(values, scale, quant, dtype, weight=weight)


def _each(values: Tensor, scale: Tensor, quant: str, dtype: torch.dtype, *, weight: bool) -> Tensor:
    """Return the scale of every element, in a shape that broadcasts."""
    columns = values.shape[-1]
    if quant == "fp8_tensor":
        return scale.to(dtype) if scale.dim() == 0 else scale.to(dtype).reshape(-1, *[1] * (values.dim() - 1))
    if quant in ("fp8_token", "int8"):
        return scale.to(dtype) if scale.dim() == values.dim() else scale.to(dtype).unsqueeze(-1)
    if quant == "fp8_block":
        each = spread(scale.to(dtype), columns, BLOCK)
        return spread(each, values.shape[-2], BLOCK, -2) if weight else each
    if quant == "nvfp4":
        return spread(scale.to(dtype), columns, 16)
    return spread(e8m0_values(scale, dtype), columns, 32)


def columns_of(x: Tensor, quant: str) -> int:
    """Return the number of K elements of an operand: two to a byte in the packed formats."""
    return 2 * x.shape[-1] if quant in PACKED and x.dtype is torch.uint8 else x.shape[-1]


def result_dtype(a: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the result: ``out_dtype``, by default that of a 16- or 32-bit ``a``, else bf16."""
    if out_dtype is not None:
        return out_dtype
    return a.dtype if a.dtype.is_floating_point and a.dtype.itemsize > 1 else torch.bfloat16
