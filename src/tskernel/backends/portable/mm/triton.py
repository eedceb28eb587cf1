"""mm in Triton: every format by one program, unpacked and scaled in registers on the way to the matrix instructions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.backends.portable import _gemm as gemm
from tskernel.dispatch.registry import Priority, register_kernel


def rejects(a: Tensor, b: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return gemm.unreadable(a, b)


@register_kernel(
    "gemm",
    "mm",
    capability=gemm.CAPABILITY,
    signatures=(),  # any that the op takes
    # Behind torch's own products where they take the format as it is; ahead of those that unpack it in memory.
    priority=Priority.PORTABLE - 1,
    priorities=[({"quant": {"mxfp8", "mxfp4", "nvfp4"}}, Priority.PORTABLE + 1)],
    rejects=rejects,
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
    out: Tensor,
) -> None:
    """Launch tiles of the result, which for few rows share out K."""
    gemm.multiply(a, b, out, a_scale=a_scale, b_scale=b_scale, bias=bias, alpha=alpha, quant=quant)


def compile_cases(chip: gemm.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    bf16, e4m3, u8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
    fp8 = torch.float8_e4m3fnuz if chip.hip and chip.shared < 100 << 10 else e4m3
    return [
        gemm.case(chip, "mxfp4 weights, few rows", 8, "mxfp4", bf16, u8, scaled=False, splits=4),
        gemm.case(chip, "bf16", 4096, "none", bf16, bf16),
        gemm.case(chip, "fp8 by rows, few rows", 8, "fp8_token", fp8, fp8, splits=4),
        gemm.case(chip, "fp8 blocks", 4096, "fp8_block", fp8, fp8),
        gemm.case(chip, "w4a16, few rows", 8, "w4a16", bf16, u8, scaled=False, splits=4),
        gemm.case(chip, "mxfp4 weights", 4096, "mxfp4", bf16, u8, scaled=False),
        gemm.case(chip, "int8", 4096, "int8", torch.int8, torch.int8),
    ]
