"""top_p_renorm in Triton: a threshold is found by adding up mass in fp64, without a sort."""

from __future__ import annotations

from torch import Tensor

from tskernel.backends.portable import _rows as host
from tskernel.backends.portable import _sample_triton as device
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


@register_kernel(
    "sampling",
    "top_p_renorm",
    capability=host.CAPABILITY,
    signatures=formats(probs=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def top_p_renorm(probs: Tensor, top_p: Tensor, *, out: Tensor) -> None:
    """Launch the search, the sums and the division."""
    device.renorm(probs, top_p, out, "top_p")
