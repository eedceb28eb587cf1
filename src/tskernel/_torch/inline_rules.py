"""The rules that replace an operator node by its kernel's body while a graph is functionalised.

Imported only when inlining is asked for: they bring in torch's tracing machinery.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from tskernel._torch.execute import INLINE, call_device, token_choice
from tskernel._torch.inline import registry_fingerprint
from tskernel._torch.runners import make_runner
from tskernel._torch.tracing import choose, statically_empty
from tskernel.dispatch.errors import NoKernelFoundError, OverrideError
from tskernel.dispatch.platform import platform_of
from tskernel.dispatch.ranking import find_choice, strip_fingerprint
from tskernel.dispatch.registry import KernelRegistry, KernelSpec

if TYPE_CHECKING:
    from tskernel.library import Op

_registered: set[str] = set()


def register_rules() -> None:
    """Register a rule for every form of every op; harmless to repeat."""
    from tskernel._torch.define import LIBRARY
    from tskernel.library import ops

    for op in ops.values():
        for form in op.forms:
            name = f"tokenspeed::{op.name}{'_' + form if form else ''}"
            if name not in _registered:
                torch.library.register_torch_dispatch(name, FunctionalTensorMode, _rule(op, form), lib=LIBRARY)
                _registered.add(name)


def _rule(op: Op, form: str) -> Any:
    def rule(
        mode: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        token, out = options.pop("override", None), options.pop("out", None)
        arguments = op.fill({**dict(zip(op.arguments, args, strict=False)), **options})
        spec = None if token is None or _keeps_ops() else _kernel_of(op, form, arguments, out, token)
        if spec is None:
            return mode.__torch_dispatch__(function, types, args, kwargs or {})
        with mode:
            return _run(op, form, spec, arguments, out)

    return rule


def _keeps_ops() -> bool:
    """Whether torch.export is tracing: an exported program keeps our operators, and is bound later."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return custom_triton_ops_decomposition_disabled()


def _run(op: Op, form: str, spec: KernelSpec, arguments: list[Any], out: Any) -> Any:
    """Trace a kernel's body, unless there is nothing to do: no kernel need cope with a grid of zero blocks."""
    tensors = [arguments[i] for i in op.signature.tensors]
    if any(statically_empty(t) for t in tensors if t is not None):
        nothing, result = _nothing(op, form, arguments, out)
        if nothing:
            return result
    return make_runner(op, spec, form)(*arguments, *((out,) if form == "out" else ()))


def _nothing(op: Op, form: str, arguments: list[Any], out: Any) -> tuple[bool, Any]:
    """Return whether all that the call gives or writes is empty, and the result then."""
    if form == "out":
        return statically_empty(out), None
    if op.mutates:
        return all(statically_empty(arguments[op.signature.index(n)]) for n in op.mutates), None
    result = op.allocate(arguments, return_lse=form == "lse")
    return all(statically_empty(t) for t in (result if isinstance(result, tuple) else (result,))), result


def _kernel_of(op: Op, form: str, arguments: list[Any], out: Any, token: str) -> KernelSpec | None:
    """Return the kernel whose body replaces the node, or None to keep the node, which is always right."""
    spec = _selected(op, form, arguments, out, token) if token.startswith(INLINE) else _bound(token)
    return spec if spec is not None and spec.traceable else None


def _selected(op: Op, form: str, arguments: list[Any], out: Any, token: str) -> KernelSpec | None:
    # Another thread's override may differ from the one that the token was made with. The body traced here is cached
    # under the token, so it must be the token's own choice.
    if token[len(INLINE) :].partition(":")[0] != registry_fingerprint():
        return None
    try:
        choice = find_choice(op, token_choice(token))
        platform = platform_of(call_device(op, arguments))
        return choose(op, form, arguments, out, platform, choice, for_all_sizes=False)
    except (NoKernelFoundError, OverrideError):
        return None  # the call says so, with the reasons, when it runs


def _bound(token: str) -> KernelSpec | None:
    """Return the kernel of a ``"<kernel>:<fingerprint>"`` token; a plain override is no such token."""
    name = strip_fingerprint(token)
    if name == token:
        return None
    try:
        spec = KernelRegistry.get().get_by_name(name)
    except KeyError:
        return None
    if token != f"{name}:{spec.fingerprint()}":
        text = f"tskernel: {token} was bound with another version of that kernel; it stays an operator node"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None
    return spec
