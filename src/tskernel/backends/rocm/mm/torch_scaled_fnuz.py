"""mm through torch._scaled_mm on gfx942, whose fp8 instructions read the fnuz encodings."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable.mm import torch_scaled
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel


@register_kernel(
    "gemm",
    "mm",
    capability=CapabilityRequirement(vendor="amd", family="gfx942"),
    signatures=torch_scaled.pairs(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    traits={
        "quant": {"fp8_tensor", "fp8_token"},
        "alpha": {False},
        "k": torch_scaled.MULTIPLES_OF_16,
        "n": torch_scaled.MULTIPLES_OF_16,
    },
    priority=Priority.PORTABLE,
    rejects=torch_scaled.rejects,
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
    """Do as the portable kernel does; only the encodings and the device differ."""
    return torch_scaled.mm(a, b, a_scale=a_scale, b_scale=b_scale, bias=bias, quant=quant, out_dtype=out_dtype)
