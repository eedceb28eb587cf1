"""mm through torch._scaled_mm: fp8 matrix instructions, scaled per tensor or per row and column."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable._matmul import aligned, unaligned_rows
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import FormatSignature, formats
from tskernel.library import HALVES

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_OUT = (*HALVES, torch.float32)
MULTIPLES_OF_16 = range(16, 2**31, 16)


def pairs(e4m3: torch.dtype, e5m2: torch.dtype) -> frozenset[FormatSignature]:
    """Return the formats that torch._scaled_mm multiplies: not two e5m2 operands."""
    return formats(a=e4m3, b=(e4m3, e5m2), out=_OUT) | formats(a=e5m2, b=e4m3, out=_OUT)


def rejects(a: Tensor, b: Tensor, bias: Tensor | None, quant: str, out_dtype: torch.dtype | None) -> str | None:
    """Return why this call does not fit, or None."""
    unaligned = unaligned_rows("a", a, 16) or unaligned_rows("b", b, 16)
    if unaligned is not None:
        return unaligned
    out = out_dtype or torch.bfloat16
    if quant == "fp8_token" and out != torch.bfloat16:
        return f"torch._scaled_mm with row scales gives bfloat16, not {out}"
    if bias is not None and (out == torch.float32 or bias.dtype != out):
        return f"torch._scaled_mm adds a 16-bit bias of the result's dtype; bias is {bias.dtype}, the result {out}"
    return None


@register_kernel(
    "gemm",
    "mm",
    # torch._scaled_mm runs on a CPU too, but slower than the reference (0.65 to 0.8 times, on AVX2): no CPU is named.
    capability=(
        CapabilityRequirement(vendor="nvidia", at_least="sm89"),
        CapabilityRequirement(vendor="amd", at_least="gfx950", features=("tensor_core:f8",)),
    ),
    signatures=pairs(_E4M3, _E5M2),
    traits={"quant": {"fp8_tensor", "fp8_token"}, "alpha": {False}, "k": MULTIPLES_OF_16, "n": MULTIPLES_OF_16},
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=True,
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
    """Call torch._scaled_mm with exact accumulation."""
    if a_scale is None or b_scale is None:
        raise ValueError("torch._scaled_mm needs both scales")
    if quant == "fp8_tensor":
        left, right = a_scale.reshape(()), b_scale.reshape(())
    else:
        left, right = a_scale.reshape(-1, 1).contiguous(), b_scale.reshape(1, -1).contiguous()
    multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return multiply(aligned(a), aligned(b).t(), left, right, bias=bias, out_dtype=out_dtype or torch.bfloat16)
