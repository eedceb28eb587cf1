"""layernorm in C++: a row is read once and held in registers."""

from __future__ import annotations

from torch import Tensor

from tskernel._torch.binding import calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return why this call does not fit, or None."""
    if bias is not None and bias.dtype != weight.dtype:
        return f"bias is {bias.dtype}, weight is {weight.dtype}: expected one dtype"
    return lib.crooked(weight=weight, bias=bias) or lib.many_dims(x=x)


@register_kernel(
    "norm",
    "layernorm",
    capability=lib.CAPABILITY,
    signatures=formats(x=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls("tskernel_native::layernorm", "x", "weight", "bias", "out", "eps")
def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, out: Tensor) -> None:
    """Launch the kernel of csrc/layernorm.cu."""
    lib.native("layernorm")(x, weight, bias, out, eps)
