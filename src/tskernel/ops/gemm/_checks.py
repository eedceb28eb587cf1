"""Checks of GEMM arguments. Metadata only; sizes may be symbolic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.library import FLOATS, FP8, expect, expect_choice, expect_dim, expect_dtype, expect_shape
from tskernel.ops.gemm._operands import BLOCK, QUANTS, columns_of
from tskernel.ops.quantization._checks import E8M0_DTYPES, MX_DTYPES, ceil_div, check_choice_of_dtype

_DATA: dict[str, tuple[torch.dtype, ...]] = {
    "fp8_tensor": FP8,
    "fp8_token": FP8,
    "fp8_block": FP8,
    "mxfp8": MX_DTYPES,
    "mxfp4": (torch.uint8,),
    "nvfp4": (torch.uint8,),
    "int8": (torch.int8,),
    "w4a16": (torch.uint8,),
}
_SCALES: dict[str, tuple[torch.dtype, ...]] = {
    "mxfp8": E8M0_DTYPES,
    "mxfp4": E8M0_DTYPES,
    "nvfp4": (torch.float8_e4m3fn,),
    "w4a16": FLOATS,
}


def check_operands(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, quant: str) -> None:
    """Check dtypes, the shared K and the scales of ``a [..., M, K]`` and ``b [..., N, K]`` (rank is checked before)."""
    expect_choice("quant", quant, QUANTS)
    if quant == "none":
        expect_dtype("a", a, FLOATS)
        expect_dtype("b", b, (a.dtype,))
        expect(a_scale is None, "a_scale", "None without quantization", "a Tensor")
        expect(b_scale is None, "b_scale", "None without quantization", "a Tensor")
    else:
        expect_dtype("b", b, _DATA[quant])
        expect(b_scale is not None, "b_scale", f"a Tensor for quant {quant!r}", None)
        # Without its scale ``a`` is plain numbers: the weight-only form.
        expect_dtype("a", a, FLOATS if a_scale is None else () if quant == "w4a16" else _DATA[quant])
    columns = columns_of(a, quant)
    expect(columns_of(b, quant) == columns, "b.shape", f"{columns} elements of K like a", tuple(b.shape))
    if a_scale is not None:
        _check_scale("a_scale", a_scale, a, columns, quant, weight=False)
    if b_scale is not None:
        _check_scale("b_scale", b_scale, b, columns, quant, weight=True)


def _check_scale(name: str, scale: Tensor, x: Tensor, columns: Any, quant: str, *, weight: bool) -> None:
    expect_dtype(name, scale, _SCALES.get(quant, (torch.float32,)))
    *lead, rows, _ = x.shape
    if quant == "fp8_tensor":
        check_one_or_each(name, scale, lead)
    elif quant in ("fp8_token", "int8"):
        expect_dim(name, scale, x.dim() - 1, x.dim())
        expect_shape(name, scale, (*lead, rows, 1)[: scale.dim()])
    elif quant == "fp8_block":
        expect_shape(name, scale, (*lead, ceil_div(rows, BLOCK) if weight else rows, ceil_div(columns, BLOCK)))
    elif quant == "w4a16":
        expect_shape(name, scale, (*lead, rows, None))
        groups = scale.shape[-1]
        expect(groups > 0, f"{name}.shape", "at least one group", tuple(scale.shape))
        expect(columns % groups == 0, f"{name}.shape", f"groups that divide K = {columns}", tuple(scale.shape))
    else:
        expect_shape(name, scale, (*lead, rows, ceil_div(columns, 16 if quant == "nvfp4" else 32)))


def check_one_or_each(name: str, value: Tensor, lead: list[Any]) -> None:
    """Check one element (rank 0 or 1), or one per matrix of a batched operand."""
    expect_dim(name, value, 0, 1)
    if value.dim() == 1 and not _is_one(value.shape[0]):
        expect_shape(name, value, lead or (1,))


def _is_one(size: Any) -> bool:
    return not isinstance(size, torch.SymInt) and size == 1


def check_epilogue(
    n: Any, lead: list[Any], bias: Tensor | None, alpha: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """Check ``bias`` (``[N]``, or one row per matrix), ``alpha`` and ``out_dtype``."""
    expect_dtype("bias", bias, FLOATS)
    if bias is not None:
        expect_dim("bias", bias, 1, 1 + len(lead))
        expect_shape("bias", bias, (*lead, n)[-bias.dim() :])
    if alpha is not None:
        expect_dtype("alpha", alpha, (torch.float32,))
        check_one_or_each("alpha", alpha, lead)
    check_choice_of_dtype("out_dtype", out_dtype, FLOATS)
