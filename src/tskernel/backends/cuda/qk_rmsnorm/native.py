"""qk_rmsnorm in C++: one launch for the heads of queries and keys."""

from __future__ import annotations

from torch import Tensor

from tskernel._torch.binding import calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import same_formats


def rejects(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    if q_weight.dtype != k_weight.dtype:
        return f"q_weight is {q_weight.dtype}, k_weight is {k_weight.dtype}: expected one dtype"
    return lib.crooked(q_weight=q_weight, k_weight=k_weight) or lib.many_dims(q=q, k=k)


@register_kernel(
    "norm",
    "qk_rmsnorm",
    capability=lib.CAPABILITY,
    signatures=same_formats("q", "k", dtypes=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
@calls("tskernel_native::qk_rmsnorm", "q", "k", "q_weight", "k_weight", "return0", "return1", "eps")
def qk_rmsnorm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Launch the kernel of csrc/rmsnorm.cu."""
    q_out, k_out = lib.new(q.shape, q), lib.new(k.shape, k)
    lib.native("qk_rmsnorm")(q, k, q_weight, k_weight, q_out, k_out, eps)
    return q_out, k_out
