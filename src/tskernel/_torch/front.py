"""Builds an op's entry points: the public function and what stands behind each torch operator."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tskernel._torch import inline
from tskernel._torch.gate import GATE
from tskernel._torch.guard import needs_dispatcher
from tskernel._torch.native_route import NativeRoute, slot_kinds
from tskernel._torch.route import Route
from tskernel._torch.source import front_source, impl_source, numbers

if TYPE_CHECKING:
    from tskernel.library import Op


def _compile(source: str, name: str, namespace: dict[str, Any]) -> FunctionType:
    file = f"<tskernel {name}>"
    # Tracebacks and debuggers show generated lines only when linecache knows them.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), namespace)
    return namespace[source[4 : source.index("(")]]


def as_tensor(value: Any, like: Tensor) -> Any:
    """Turn a Python number given for a tensor argument (a scale) into a one-element fp32 tensor."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.full((1,), value, dtype=torch.float32, device=like.device)
    return value


def build_front(op: Op, *, native: bool = GATE is not None) -> Callable[..., Any]:
    """Return the public function of an op. Three routes, in order: tracing, plain eager tensors, everything else.

    ``native`` says whether its memory is that of the C++ gate.
    """
    namespace: dict[str, Any] = {}
    if native:
        namespace["_recall"] = _native_front(op)
    else:
        namespace["_miss"] = _miss_of(op, Route(op, namespace))
    namespace.update(
        {
            "_dynamo": torch.compiler.is_dynamo_compiling,
            "_overridden": torch._C._has_torch_function_unary,  # a TorchFunctionMode, which no dispatch key shows
            "_inline": inline,
            "_tensor": as_tensor,
            **{f"_op{'_' + f if f else ''}": op.torch_op(f) for f in op.forms},
        }
    )
    front = _compile(front_source(op, native=native), op.name, namespace)
    front.__doc__ = op.doc
    front.__module__ = "tskernel"
    front.__annotations__ = public_annotations(op)
    front.__signature__ = _signature(front, numbers(op))  # pyright: ignore[reportFunctionMemberAccess]
    return front


def _signature(front: FunctionType, defaults: dict[str, Any]) -> inspect.Signature:
    """Return the signature with the defaults that a caller gets."""
    found = inspect.signature(front)
    return found.replace(
        parameters=[p.replace(default=defaults.get(n, p.default)) for n, p in found.parameters.items()]
    )


def _miss_of(op: Op, route: Route) -> Callable[..., Any]:
    """Return what the public function does with a call that has no hot look."""
    function_mode = torch._C._is_torch_function_mode_enabled

    def miss(
        arguments: tuple[Any, ...], return_lse: bool, out: Tensor | None, override: str | None, options: Any, hot: str
    ) -> Any:
        if not function_mode() and (run := route.recall(options, arguments, out, hot)) is not None:
            return run(*arguments) if out is None else (run(*arguments, out), out)[1]
        given = _with_tensors(op, arguments)
        if given is not arguments:
            return miss(given, return_lse, out, override, options, hot)
        form = _form(op, return_lse, out)
        if _beyond_kernels(op, arguments, out):
            result = _dispatch(op, form, arguments, out, override)
        else:
            result = route.serve(form, arguments, out, override, options, hot)
        return result if out is None else out

    return miss


def _native_front(op: Op) -> Callable[..., Any]:
    """Return the memory in C++ of a public function, which takes arguments, ``out``, ``return_lse`` and ``override``.

    Those of the three that the op has.
    """
    n = len(op.arguments)

    def miss(*slots: Any) -> Any:
        arguments, out, override = slots[:n], slots[n] if op.out else None, slots[-1]
        given = _with_tensors(op, arguments)
        if given is not arguments:
            return route.memory(*given, *slots[n:])
        form = _form(op, op.lse and slots[-2], out)
        if _beyond_kernels(op, arguments, out):
            result = _dispatch(op, form, arguments, out, override)
        else:
            result = route.serve(form, arguments, out, override, slots)
        return result if out is None else out

    kinds = slot_kinds(op, buffer="R" if op.out else "", flags=1 + op.lse)
    route = NativeRoute(op, kinds, miss, front=True)
    return route.memory


def _form(op: Op, return_lse: bool, out: Tensor | None) -> str:
    if return_lse and out is not None:
        raise ValueError(
            f"tokenspeed::{op.name}: out: expected None with return_lse=True, got a Tensor; the LSE form allocates"
        )
    return "lse" if return_lse else "out" if out is not None else ""


def _beyond_kernels(op: Op, arguments: tuple[Any, ...], out: Tensor | None) -> bool:
    """Whether the dispatcher has to see a call."""
    tensors = [t for t in (*[arguments[i] for i in op.signature.tensors], out) if isinstance(t, Tensor)]
    return needs_dispatcher(tensors, autocast=bool(op.autocast))


def _with_tensors(op: Op, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with tensors for the numbers that were given for some; the same tuple where none was."""
    like = next((a for a in arguments if isinstance(a, Tensor)), None)
    pairs = list(zip(arguments, op.signature.params, strict=True))
    if like is None or not any(p.is_tensor and a.__class__ in (int, float) for a, p in pairs):
        return arguments
    return tuple(as_tensor(a, like) if p.is_tensor else a for a, p in pairs)


def public_annotations(op: Op) -> dict[str, str]:
    """Return the annotations of the public function."""
    notes = {p.name: p.annotation for p in op.signature.params}
    notes |= {"return_lse": "bool"} if op.lse else {}
    notes |= {"out": "Tensor | None"} if op.out else {}
    return {**notes, "override": "str | None", "return": op.body.__annotations__["return"]}


def _dispatch(op: Op, form: str, arguments: tuple[Any, ...], out: Tensor | None, override: str | None) -> Any:
    if op.shard:
        from tskernel._torch.sharding import ensure_rules

        ensure_rules(arguments)
    n = op.signature.positional
    keywords = dict(zip(op.arguments[n:], arguments[n:], strict=True))
    if form == "out":
        keywords["out"] = out
    return op.torch_op(form)(*arguments[:n], **keywords, override=override)


def build_impl(op: Op, form: str, stub: FunctionType) -> FunctionType:
    """Turn the function that was registered for a torch operator into what it runs on real tensors."""
    if GATE is None:
        stub.__globals__["_serve"] = _serve_of(op, form, Route(op, stub.__globals__))
    else:
        stub.__globals__["_recall"] = _native_impl(op, form)
    source = impl_source(op, form, native=GATE is not None)
    made = _compile(source, f"{op.name} {form}".strip(), stub.__globals__)
    stub.__defaults__, stub.__kwdefaults__ = made.__defaults__, made.__kwdefaults__
    stub.__code__ = made.__code__  # last: another thread may be calling
    return stub


def _serve_of(op: Op, form: str, route: Route) -> Callable[..., Any]:
    def serve(arguments: tuple[Any, ...], out: Tensor | None, override: str | None, options: Any, hot: str) -> Any:
        if (run := route.recall(options, arguments, out, hot)) is not None:
            return run(*arguments) if out is None else run(*arguments, out)
        return route.serve(form, arguments, out, override, options, hot)

    return serve


def _native_impl(op: Op, form: str) -> Callable[..., Any]:
    """Return the memory in C++ of a torch operator, which takes arguments, ``out`` if it has one and ``override``."""
    n = len(op.arguments)

    def miss(*slots: Any) -> Any:
        return route.serve(form, slots[:n], slots[n] if form == "out" else None, slots[-1], slots)

    route = NativeRoute(op, slot_kinds(op, buffer="T" if form == "out" else "", flags=1), miss, front=False)
    return route.memory


def signature_text(op: Op) -> str:
    """Return the public signature, for documentation."""
    return f"{op.name}{inspect.signature(op.front)}"
