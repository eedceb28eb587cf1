"""The rules that replace an operator node by its kernel's body while a graph is functionalised. Imported only when inlining is asked for."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from tskernel._torch.execute import INLINE, call_request, call_with, make_runner, named
from tskernel.dispatch.registry import KernelRegistry, KernelSpec
from tskernel.dispatch.selection import ranking, reject_reason, strip_fingerprint

if TYPE_CHECKING:
    from tskernel.library import Op

_registered: set[str] = set()


def register_rules() -> None:
    """Register a rule for every op; harmless to repeat."""
    from tskernel._torch.define import LIBRARY
    from tskernel.library import ops

    for op in ops.values():
        for form in op.forms:
            name = f"tokenspeed::{op.name}{'_' + form if form else ''}"
            if name not in _registered:
                torch.library.register_torch_dispatch(name, FunctionalTensorMode, _rule(op, form), lib=LIBRARY)
                _registered.add(name)


def _rule(op: Op, form: str) -> Any:
    def rule(mode: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        token = options.pop("override", None)
        out = options.pop("out", None)
        arguments = op.fill({**dict(zip(op.arguments, args, strict=False)), **options})
        spec = None if _keeps_ops() else _chosen(op, form, arguments, out, token)
        if spec is None:
            return mode.__torch_dispatch__(function, types, args, kwargs or {})
        with mode:
            return call_with(op, make_runner(op, spec, form), arguments, **({"out": out} if form == "out" else {}))

    return rule


def _keeps_ops() -> bool:
    """Whether torch.export is tracing: an exported program keeps our operators, and is bound later."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return custom_triton_ops_decomposition_disabled()


def _chosen(op: Op, form: str, arguments: list[Any], out: Any, token: str | None) -> KernelSpec | None:
    """Return the kernel whose body replaces the node, or None to keep the node."""
    if token is None:
        return None
    if token.startswith(INLINE):
        request = call_request(op, arguments, form, token)
        values = named(op, arguments, out)
        spec = next((s for s in ranking(request).fits if reject_reason(s, values) is None), None)
        return spec if spec is not None and spec.traceable else None
    name = strip_fingerprint(token)
    if name == token:
        return None
    spec = KernelRegistry.get().get_by_name(name)
    if token != f"{name}:{spec.fingerprint()}":
        warnings.warn(f"tskernel: {token} was bound with another version of that kernel; it stays an operator node", RuntimeWarning, stacklevel=2)
        return None
    return spec if spec.traceable else None
