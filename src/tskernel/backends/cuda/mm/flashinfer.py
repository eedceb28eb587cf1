"""mm of fp8 blocks by FlashInfer, whose kernel for Hopper is TensorRT-LLM's copy of DeepGEMM.

Read in flashinfer-python 0.7.4 (flashinfer/gemm/gemm_base.py, data/csrc/fp8_blockscale_gemm_sm90_binding.cu). It reads
the memory of its operands as if they were contiguous and unchecked, so others are declined. The scales of ``a`` it
reads column by column, columns padded to four rows, whatever their shape says; they are brought into that order here.
It writes bf16 whatever the dtype of its result is.

Source: https://github.com/flashinfer-ai/flashinfer.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.backends.cuda._vendor_gemm import UNMEASURED, column_scales, compiled_call
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import register_kernel
from tskernel.dispatch.signature import formats

_CAPABILITY: Final = CapabilityRequirement(
    vendor="nvidia", exactly=("sm90",), packages=("flashinfer.gemm:fp8_blockscale_gemm_sm90",)
)


def rejects(a: Tensor, b: Tensor, a_scale: Tensor | None) -> str | None:
    """Return why FlashInfer cannot take the call, or None."""
    if a_scale is None:
        return "a_scale is None: with a bf16 a, FlashInfer would round it to fp8"
    if not (a.is_contiguous() and b.is_contiguous()):
        return f"strides of a {a.stride()}, b {b.stride()}: FlashInfer reads both as if contiguous"
    return None


@register_kernel(
    "gemm",
    "mm",
    capability=_CAPABILITY,
    signatures=formats(a=torch.float8_e4m3fn, b=torch.float8_e4m3fn, out=torch.bfloat16),
    traits={
        "quant": {"fp8_block"},
        "bias": {False},
        "alpha": {False},
        "k": range(128, 2**31, 128),
        "n": range(64, 2**31, 64),
    },
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
    """Lay the scales out and call FlashInfer."""
    from flashinfer.gemm import fp8_blockscale_gemm_sm90  # pyright: ignore[reportMissingImports]

    if a_scale is None or b_scale is None:
        raise ValueError("FlashInfer needs both scales")
    if out.numel() == 0:
        return
    target = out if out.is_contiguous() and out.data_ptr() % 16 == 0 else torch.empty(out.shape, dtype=out.dtype,
                                                                                      device=out.device)  # fmt: skip
    compiled_call(
        "FlashInfer", ("mm", a.device, a.shape, b.shape), fp8_blockscale_gemm_sm90, rows.aligned(a), rows.aligned(b),
        column_scales(a_scale), b_scale.contiguous(), out=target,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)
