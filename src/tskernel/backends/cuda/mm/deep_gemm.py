"""mm of fp8 blocks by DeepGEMM."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.cuda import _deep_gemm as deep
from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.backends.cuda._vendor_gemm import UNMEASURED
from tskernel.dispatch.registry import register_kernel


def rejects(a: Tensor, b: Tensor, a_scale: Tensor | None) -> str | None:
    """Return why DeepGEMM cannot take the call, or None."""
    if a_scale is None:
        return "a_scale is None: DeepGEMM multiplies two fp8 matrices"
    return rows.crooked(a=a, b=b)


@register_kernel(
    "gemm",
    "mm",
    capability=deep.CAPABILITY,
    signatures=deep.SIGNATURES,
    traits=deep.TRAITS,
    priority=UNMEASURED,
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
    """Call DeepGEMM's plain product."""
    if a_scale is None or b_scale is None:
        raise ValueError("DeepGEMM needs both scales")
    deep.multiply(a, b, a_scale, b_scale, out)
