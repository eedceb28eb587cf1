"""mm through torch._int_mm: int8 matrix instructions with exact int32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable._matmul import aligned, unaligned_rows
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats
from tskernel.library import FLOATS

_FEWEST_ROWS = 17  # torch._int_mm refuses fewer on CUDA
_MULTIPLES_OF_8 = range(8, 2**31, 8)


def rejects(a: Tensor, b: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return unaligned_rows("a", a, 8) or unaligned_rows("b", b, 8)


@register_kernel(
    "gemm",
    "mm",
    # No CPU: without VNNI torch._int_mm is 10 to 30 times slower than the fp32 product of the reference.
    capability=(
        CapabilityRequirement(vendor="nvidia", features=("tensor_core:int8",)),
        CapabilityRequirement(vendor="amd", features=("tensor_core:int8",)),
    ),
    signatures=formats(a=torch.int8, b=torch.int8, out=FLOATS),
    traits={"quant": {"int8"}, "k": _MULTIPLES_OF_8, "n": _MULTIPLES_OF_8},
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
    """Multiply in int32, then apply scales, alpha and bias in fp32."""
    if a_scale is None or b_scale is None:
        raise ValueError("torch._int_mm needs both scales")
    rows = a.shape[0]
    enough = isinstance(rows, int) and rows >= _FEWEST_ROWS
    full = a if enough else torch.nn.functional.pad(a, (0, 0, 0, _FEWEST_ROWS - 1))
    product = torch._int_mm(aligned(full), aligned(b).t())  # pyright: ignore[reportPrivateImportUsage]
    y = product[:rows].to(torch.float32)
    y = y * a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
    if alpha is not None:
        y = y * alpha
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(out_dtype or torch.bfloat16)
