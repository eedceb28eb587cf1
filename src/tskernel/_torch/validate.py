"""The checks that every op needs: argument types, one device, no gradient wanted, a fitting ``out``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tskernel.checks import expect_dtype, expect_shape, message, on_meta

if TYPE_CHECKING:
    from tskernel.library import Op

_INT = (int, torch.SymInt)
_FLOAT = (int, float, torch.SymFloat, torch.SymInt)
_ACCEPTS: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "SymInt": _INT,
    "float": _FLOAT,
    "bool": (bool, torch.SymBool),
    "str": (str,),
    "ScalarType": (torch.dtype,),
}


def check_arguments(op: Op, arguments: Sequence[Any], out: Tensor | None) -> None:
    """Check types, that dynamic ints are not negative, and that all tensors are on one device."""
    device: torch.device | None = None
    owner = ""
    for param, value in zip(op.signature.params, arguments, strict=True):
        if value is None and param.optional:
            continue
        kind = param.type.rstrip("?")
        if value is None or not isinstance(value, _ACCEPTS[kind]) or (kind == "SymInt" and isinstance(value, bool)):
            raise ValueError(message(param.name, param.annotation, f"{type(value).__name__} {value!r}"[:120]))
        if isinstance(value, Tensor):
            if device is None:
                device, owner = value.device, param.name
            elif value.device != device:
                raise ValueError(message(f"{param.name}.device", f"{device} like {owner}", value.device))
        elif param.name in op.dynamic and isinstance(value, int) and value < 0:
            raise ValueError(message(param.name, "at least 0", value))
    if out is not None and device is not None and out.device != device:
        raise ValueError(message("out.device", f"{device} like {owner}", out.device))


def check_out(op: Op, arguments: Sequence[Any], out: Tensor | None) -> None:
    """Check that ``out`` looks like what the op would allocate; its strides are free."""
    if not isinstance(out, Tensor):
        raise ValueError(message("out", "a Tensor", type(out).__name__))
    with on_meta():
        want = op.allocate(arguments)
    expect_shape("out", out, want.shape)
    expect_dtype("out", out, (want.dtype,))


def refuse_gradient(op: Op, arguments: Sequence[Any]) -> None:
    """Raise RuntimeError when the call would need a gradient: ops are inference-only."""
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return
    for i in op.signature.tensors:
        tensor = arguments[i]
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"tokenspeed::{op.name} is inference-only and {op.signature.names[i]} requires grad: "
                "call it under torch.inference_mode() or torch.no_grad(), or detach the tensor"
            )
