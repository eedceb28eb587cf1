"""bmm in Triton: the program of mm, for each matrix of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.backends.portable import _gemm as gemm
from tskernel.dispatch.registry import Priority, register_kernel

COMPILE_PARTS = ("sm90", "gfx942")


def rejects(a: Tensor, b: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return gemm.unreadable(a, b)


@register_kernel(
    "gemm",
    "bmm",
    capability=gemm.CAPABILITY,
    signatures=(),  # any that the op takes
    # Behind torch's own products where they take the format as it is; ahead of those that unpack it in memory.
    priority=Priority.PORTABLE - 1,
    priorities=[({"quant": {"mxfp8", "mxfp4", "nvfp4"}}, Priority.PORTABLE + 1)],
    rejects=rejects,
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
    out: Tensor,
) -> None:
    """Launch tiles of the result, which for few rows share out K."""
    gemm.multiply(a, b, out, a_scale=a_scale, b_scale=b_scale, bias=bias, alpha=alpha, quant=quant)


def compile_cases(chip: gemm.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip: one case, mm compiles the program for all formats."""
    return [gemm.case(chip, "bf16, some rows", 64, "none", torch.bfloat16, torch.bfloat16)]
