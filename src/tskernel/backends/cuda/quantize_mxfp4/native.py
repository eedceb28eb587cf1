"""quantize_mxfp4 in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel._torch.binding import Constant, calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.many_dims(x=x)


@register_kernel(
    "quantization",
    "quantize_mxfp4",
    capability=lib.CAPABILITY,
    signatures=formats(x=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls("tskernel_native::quantize_groups", "x", "return0", "return1", Constant(32), Constant(1), Constant(True))
def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Launch a kernel of csrc/quantize_groups.cu."""
    *lead, columns = x.shape
    data = lib.new((*lead, columns // 2), x, torch.uint8)
    scale = lib.new((*lead, -(-columns // 32)), x, torch.uint8)
    lib.native("quantize_groups")(x, data, scale, 32, 1, True)
    return data, scale
