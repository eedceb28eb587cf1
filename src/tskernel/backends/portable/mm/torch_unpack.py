"""mm of block formats through bf16: unpacked they are exact in bf16, so the 16-bit matrix instructions lose nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable._matmul import other_bias
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats
from tskernel.ops.gemm._operands import plain_operands

_STORED = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def rejects(bias: Tensor | None) -> str | None:
    """Return why this call does not fit, or None."""
    return other_bias(bias, torch.bfloat16)


@register_kernel(
    "gemm",
    "mm",
    # No CPU: where it has no 16-bit matrix instructions, the reference's fp32 product is faster.
    capability=[CapabilityRequirement(vendor=v, features=("tensor_core:f16",)) for v in ("nvidia", "amd", "ascend")],
    signatures=formats(a=(torch.bfloat16, *_STORED), b=_STORED, out=torch.bfloat16),
    # Significant bits: e2m1 2, e4m3 4, e2m1 times an e4m3 scale 6; bf16 has 8. Other scales are fp32 and would round.
    traits={"quant": {"mxfp8", "mxfp4", "nvfp4"}, "alpha": {False}},
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
    out: Tensor,
) -> None:
    """Unpack both operands, then call torch.mm or torch.addmm."""
    x, w = plain_operands(a, b, a_scale, b_scale, quant)
    x, w = x.to(torch.bfloat16), w.to(torch.bfloat16)
    if bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)
