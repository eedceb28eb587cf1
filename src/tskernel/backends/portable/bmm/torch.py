"""bmm through torch.bmm: the vendor's BLAS on every device torch has one for."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable._matmul import other_bias, slow_on_cpu
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats
from tskernel.library import FLOATS


def rejects(a: Tensor, bias: Tensor | None) -> str | None:
    """Return why this call does not fit, or None."""
    return other_bias(bias, a.dtype) or slow_on_cpu(a)


@register_kernel(
    "gemm",
    "bmm",
    capability=ANY,
    signatures=same_formats("a", "b", "out", dtypes=FLOATS),
    traits={"quant": {"none"}, "alpha": {False}},
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=True,
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
    """Call torch.bmm, or torch.baddbmm, which adds the bias before rounding."""
    if bias is None:
        torch.bmm(a, b.mT, out=out)
    else:
        torch.baddbmm(bias.unsqueeze(-2), a, b.mT, out=out)
