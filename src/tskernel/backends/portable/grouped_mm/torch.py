"""grouped_mm through torch.nn.functional.grouped_mm: one launch over all groups, offsets stay on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable._matmul import aligned, unaligned_rows
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.library import FLOATS


def rejects(a: Tensor, b: Tensor, offsets: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    if a.is_cuda and a.dtype != torch.bfloat16:
        return f"torch's grouped kernel on a GPU takes bfloat16, a is {a.dtype}"
    step = 16 // a.element_size()
    if b.shape[1] % step or b.shape[2] % step or b.shape[2] == 0:
        return f"N and K must be multiples of {step}, b is {tuple(b.shape)}"
    if not (b.is_contiguous() and offsets.is_contiguous()):
        return "b and offsets must be contiguous"
    return unaligned_rows("a", a, 16)


@register_kernel(
    "gemm",
    "grouped_mm",
    # Elsewhere torch falls back to a loop that reads the offsets on the host; on a CPU that costs nothing.
    capability=(CapabilityRequirement(vendor="cpu"), CapabilityRequirement(vendor="nvidia", exactly=("sm90", "sm100"))),
    signatures=same_formats("a", "b", "out", dtypes=FLOATS),
    traits={"quant": {"none"}, "bias": {False}, "alpha": {False}},
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=True,
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
) -> Tensor:
    """Call grouped_mm, then clear the rows past the last group, which it leaves unwritten."""
    y = torch.nn.functional.grouped_mm(aligned(a), aligned(b).mT, offs=offsets)
    row = torch.arange(a.shape[0], device=a.device).unsqueeze(1)
    return torch.where(row < offsets[-1], y, 0.0).contiguous()
