"""grouped_mm of fp8 blocks by DeepGEMM, rows moved to where its groups may start."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.cuda import _deep_gemm as deep
from tskernel.backends.cuda._vendor_gemm import UNMEASURED
from tskernel.dispatch.registry import register_kernel


def rejects(a: Tensor, b: Tensor, offsets: Tensor, a_scale: Tensor | None) -> str | None:
    """Return why DeepGEMM cannot take the call, or None."""
    if a_scale is None:
        return "a_scale is None: DeepGEMM multiplies two fp8 matrices"
    if a.stride(-1) != 1 or not (b.is_contiguous() and offsets.is_contiguous()):
        return f"strides of a {a.stride()}, b {b.stride()}: rows of a, b and offsets must be contiguous"
    return None


@register_kernel(
    "gemm",
    "grouped_mm",
    capability=deep.GROUPED,
    signatures=deep.SIGNATURES,
    traits=deep.TRAITS,
    priority=UNMEASURED,
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
    """Move rows, call DeepGEMM's grouped product, move results back."""
    if a_scale is None or b_scale is None:
        raise ValueError("DeepGEMM needs both scales")
    deep.multiply_groups(a, b, offsets, a_scale, b_scale, out)
