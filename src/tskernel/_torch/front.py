"""Writes the Python of an op's entry points from its signature.

Generated rather than generic, because the comparison that a repeated call needs must name its arguments: a loop over them would cost
more than the call. ``source_of`` shows the text.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tskernel._torch import inline
from tskernel._torch.execute import Route
from tskernel._torch.guard import needs_dispatcher
from tskernel._torch.schema import REQUIRED, Param

if TYPE_CHECKING:
    from tskernel.library import Op


def _parameters(op: Op, extra: list[str]) -> str:
    parts, starred = [], False
    for p in op.signature.params:
        if p.keyword_only and not starred:
            parts.append("*")
            starred = True
        parts.append(p.name if p.default is REQUIRED else f"{p.name}={p.default!r}")
    return ", ".join([*parts, *([] if starred else ["*"]), *extra])


def _call(op: Op) -> str:
    return ", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in op.signature.params)


def _tuple(items: list[str]) -> str:
    return "(" + "".join(f"{i}, " for i in items) + ")"


def _scalars(op: Op, extra: list[str]) -> str:
    """Return the tuple of everything but the tensors that decides a call: options, which optional tensors are given, the form."""
    items = [p.name for p in op.signature.params if not p.is_tensor and p.name not in op.dynamic]
    items += [f"{p.name} is None" for p in op.signature.params if p.type == "Tensor?"]
    return _tuple([*items, *extra])


def _dynamic(p: Param) -> str:
    test = f"{p.name}.__class__ is int and {p.name} >= 0"
    return f"({p.name} is None or {test})" if p.optional else test


def _same(op: Op, *, out: bool, out_optional: bool) -> str:
    """Return the expression that says whether the call looks like the hot one."""
    required = [p.name for p in op.signature.params if p.type == "Tensor"] + (["out"] if out and not out_optional else [])
    optional = [p.name for p in op.signature.params if p.type == "Tensor?"] + (["out"] if out and out_optional else [])
    plain = ", ".join(required)
    guard = f"check({plain})"
    if optional:
        given = f"*[t for t in {_tuple(optional)} if t is not None]"
        none = " and ".join(f"{n} is None" for n in optional)
        guard = f"(check({plain}) if {none} else check({', '.join([*required, given])}))"
    dynamic = [_dynamic(p) for p in op.signature.params if p.name in op.dynamic]
    return " and ".join(["scalars == now", *dynamic, guard])


def front_source(op: Op) -> str:
    """Return the text of the public function."""
    lse, out = op.lse, op.out
    extra = [*(["return_lse=False"] if lse else []), *(["out=None"] if out else []), "override=None"]
    flags = [*(["return_lse"] if lse else []), *(["out is None"] if out else []), "override"]
    everything = _tuple(list(op.arguments))
    lines = [
        f"def {op.name}({_parameters(op, extra)}):",
        "    if _dynamo():",
        *[f"        {p.name} = _tensor({p.name}, {_first_tensor(op)})" for p in op.signature.params if p.type == "Tensor?"],
        "        token = override",
        "        if _inline.TOKEN is not None: token = _inline.TOKEN if token is None else f'{_inline.TOKEN}:{token}'",
        *([f"        if return_lse: return _op_lse({_call(op)}, override=token)"] if lse else []),
        *([f"        if out is not None: _op_out({_call(op)}, out=out, override=token); return out"] if out else []),
        f"        return _op({_call(op)}, override=token)",
        "    scalars, check, run = _hot",
        f"    now = {_scalars(op, flags)}",
        f"    if {_same(op, out=out, out_optional=True)}:",
        *([f"        if out is not None: run({_call(op)}, out=out); return out"] if out else []),
        f"        return run({_call(op)})",
        f"    return _miss({everything}, {'return_lse' if lse else 'False'}, {'out' if out else 'None'}, override, now)",
    ]
    return "\n".join(lines) + "\n"


def _first_tensor(op: Op) -> str:
    return next(p.name for p in op.signature.params if p.type == "Tensor")


def impl_source(op: Op, form: str) -> str:
    """Return the text of the function behind one torch operator."""
    extra = [*(["out"] if form == "out" else []), "override=None"]
    out = ", out=out" if form == "out" else ""
    lines = [
        f"def {op.name}_impl({_parameters(op, extra)}):",
        "    scalars, check, run = _hot",
        f"    now = {_scalars(op, ['override'])}",
        f"    if {_same(op, out=form == 'out', out_optional=False)}:",
        f"        return run({_call(op)}{out})",
        f"    return _serve({form!r}, {_tuple(list(op.arguments))}, {'out' if out else 'None'}, override, now)",
    ]
    return "\n".join(lines) + "\n"


def _compile(source: str, name: str, namespace: dict[str, Any]) -> Callable[..., Any]:
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


def build_front(op: Op) -> Callable[..., Any]:
    """Return the public function of an op. Three routes, in this order: tracing, plain eager tensors, everything else."""
    route = Route(op)

    def miss(arguments: tuple[Any, ...], return_lse: bool, out: Tensor | None, override: str | None, now: Any) -> Any:
        if return_lse and out is not None:
            raise ValueError(f"tokenspeed::{op.name}: out: expected None with return_lse=True, got a Tensor; the LSE form allocates")
        form = "lse" if return_lse else "out" if out is not None else ""
        first = next((a for a in arguments if isinstance(a, Tensor)), None)
        if first is not None:
            arguments = tuple(as_tensor(a, first) if p.is_tensor else a for a, p in zip(arguments, op.signature.params, strict=True))
        tensors = [t for t in (*[arguments[i] for i in op.signature.tensors], out) if isinstance(t, Tensor)]
        if needs_dispatcher(tensors, autocast=bool(op.autocast)):
            result = _dispatch(op, form, arguments, out, override)
        else:
            result = route.serve(form, arguments, out, override, now)
        return out if form == "out" else result

    route.namespace.update(
        _dynamo=torch.compiler.is_dynamo_compiling,
        _inline=inline,
        _tensor=as_tensor,
        _miss=miss,
        **{f"_op{'_' + f if f else ''}": op.torch_op(f) for f in op.forms},
    )
    front = _compile(front_source(op), op.name, route.namespace)
    front.__doc__ = op.doc
    front.__module__ = "tskernel"
    front.__annotations__ = public_annotations(op)
    return front


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


def build_impl(op: Op, form: str) -> Callable[..., Any]:
    """Return the function that a torch operator runs on real tensors."""
    route = Route(op)
    route.namespace["_serve"] = route.serve
    return _compile(impl_source(op, form), f"{op.name} {form}".strip(), route.namespace)


def source_of(op: Op) -> str:
    """Return the generated text of an op's public function and operators, for reading."""
    return "\n".join([front_source(op), *[impl_source(op, f) for f in op.forms]])


def signature_text(op: Op) -> str:
    """Return the public signature, for documentation."""
    return f"{op.name}{inspect.signature(op.front)}"
