"""Checks and trait values that the quantization ops share. Metadata only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.library import FLOATS, expect, expect_dim, expect_dtype, expect_shape
from tskernel.ops.quantization._math import FP8_MAX

FP8_DTYPES = tuple(FP8_MAX)
MX_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
GRANULARITIES = ("tensor", "token", "group", "block")
E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


def ceil_div(a: Any, b: int) -> Any:
    """Return the quotient rounded up; sizes may be symbolic."""
    return (a + b - 1) // b


def check_rows(x: Tensor) -> None:
    """Check that ``x`` is fp32, fp16 or bf16 and has columns."""
    expect_dtype("x", x, FLOATS)
    expect(x.dim() > 0, "x.shape", "at least one dimension", tuple(x.shape))
    expect(x.shape[-1] > 0, "x.shape", "at least one column", tuple(x.shape))


def check_even_rows(x: Tensor) -> None:
    """Check rows that are packed two values to a byte."""
    check_rows(x)
    expect(x.shape[-1] % 2 == 0, "x.shape[-1]", "an even number of columns", x.shape[-1])


def check_choice_of_dtype(argument: str, dtype: torch.dtype | None, choices: tuple[torch.dtype, ...]) -> None:
    """Check an optional dtype argument."""
    expected = " or ".join(str(d).removeprefix("torch.") for d in choices)
    expect(dtype is None or dtype in choices, argument, expected, dtype)


def check_one_element(argument: str, scale: Tensor) -> None:
    """Check an fp32 tensor with one element, of rank 0 or 1."""
    expect_dtype(argument, scale, (torch.float32,))
    expect_dim(argument, scale, 0, 1)
    if scale.dim() == 1:
        expect_shape(argument, scale, (1,))


def check_row_scale(scale: Tensor, data: Tensor) -> None:
    """Check an fp32 scale of one element (rank 0 or 1) or one per row of ``data`` (``[..., 1]``)."""
    if scale.dim() <= 1:
        check_one_element("scale", scale)
    else:
        expect_dtype("scale", scale, (torch.float32,))
        expect_shape("scale", scale, (*data.shape[:-1], 1))


def check_block_scale(scale: Tensor, data: Tensor, columns: Any, block: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check one scale per ``block`` columns, the last block may be partial."""
    expect_dtype("scale", scale, dtypes)
    expect_shape("scale", scale, (*data.shape[:-1], ceil_div(columns, block)))


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float8_e4m3fn" for torch.float8_e4m3fn: trait values are strings."""
    return str(dtype).removeprefix("torch.")
