"""gelu_and_mul in C++."""

from __future__ import annotations

from torch import Tensor

from tskernel._torch.binding import Constant, calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.many_dims(x=x)


@register_kernel(
    "activation",
    "gelu_and_mul",
    capability=lib.CAPABILITY,
    signatures=formats(x=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls("tskernel_native::gated_activation", "x", "out", Constant(lib.ACTIVATIONS["gelu"]))
def gelu_and_mul(x: Tensor, *, out: Tensor) -> None:
    """Launch the kernel of csrc/gated_activation.cu."""
    lib.native("gated_activation")(x, out, lib.ACTIVATIONS["gelu"])
