"""qk_rmsnorm in Triton: heads of queries and keys in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable import _norm_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats


@register_kernel(
    "norm",
    "qk_rmsnorm",
    capability=host.CAPABILITY,
    signatures=same_formats("q", "k", dtypes=host.FLOAT_DTYPES),
    traits={"hidden": range(1, host.ONE_PASS + 1)},
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def qk_rmsnorm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Launch the norm of the rows of both."""
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    device.norm_two(q, k, q_weight, k_weight, q_out, k_out, eps)
    return q_out, k_out
