"""grouped_mm in Triton: the program of mm; tiles find their group on the device, nothing is read for an empty one."""

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
    "grouped_mm",
    capability=gemm.CAPABILITY,
    signatures=(),  # any that the op takes
    # Behind torch's own products where they take the format as it is; ahead of those that unpack it in memory.
    priority=Priority.PORTABLE - 1,
    priorities=[({"quant": {"mxfp8", "mxfp4", "nvfp4"}}, Priority.PORTABLE + 1)],
    rejects=rejects,
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
    out: Tensor,
) -> None:
    """Launch as many tiles as there may be; those behind the last group's write zeros."""
    gemm.multiply(
        a, b, out, a_scale=a_scale, b_scale=b_scale, bias=bias, alpha=alpha, quant=quant, offsets=offsets.contiguous()
    )


def compile_cases(chip: gemm.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        gemm.case(chip, "32 groups of bf16", 64, "none", torch.bfloat16, torch.bfloat16, groups=32),
        gemm.case(
            chip, "128 groups of mxfp4 weights", 64, "mxfp4", torch.bfloat16, torch.uint8, scaled=False, groups=128
        ),
    ]
