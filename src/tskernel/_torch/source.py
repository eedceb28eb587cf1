"""The Python text of an op's entry points, from its signature.

Generated rather than generic, because what a repeated call does must name its arguments: a loop over them would cost
more than the call. ``source_of`` shows the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tskernel._torch.schema import REQUIRED, Param

if TYPE_CHECKING:
    from tskernel.library import Op


def numbers(op: Op) -> dict[str, Any]:
    """Return the arguments whose default is a number that Dynamo would make an input of the graph, with the number.

    The public function takes None for them and puts the number in, as a constant of its code. (0 and 1 are constants
    to Dynamo anyway.)
    """
    params = [p for p in op.signature.params if not p.optional]
    return {p.name: p.default for p in params if type(p.default) in (int, float) and str(p.default) not in "-101"}


def _parameters(op: Op, extra: list[str], named: dict[str, Any] | None = None) -> str:
    parts, starred = [], False
    for p in op.signature.params:
        if p.keyword_only and not starred:
            parts.append("*")
            starred = True
        default = None if named and p.name in named else repr(p.default)
        parts.append(p.name if p.default is REQUIRED else f"{p.name}={default}")
    return ", ".join([*parts, *([] if starred else ["*"]), *extra])


def _keywords(op: Op) -> str:
    return ", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in op.signature.params)


def _tuple(items: list[str]) -> str:
    return "(" + "".join(f"{i}, " for i in items) + ")"


def _options(op: Op, extra: list[str]) -> list[str]:
    """Return what decides a call besides its tensors and sizes.

    Numbers come with their classes: True equals 1 and 1.0, and is no window.
    """
    own = [p for p in op.signature.params if not p.is_tensor and p.name not in op.dynamic]
    classes = [f"{p.name}.__class__" for p in own if p.type.rstrip("?") in ("SymInt", "int", "float", "bool")]
    return [*[p.name for p in own], *classes, *extra]


def _is_int(p: Param, also: str = "") -> str:
    test = f"{p.name}.__class__ is int{also}"
    return f"({p.name} is None or {test})" if p.optional else test


def _loop(hot: str, test: str, then: list[str]) -> list[str]:
    """Return the lines that run a call which looks like one of the last few."""
    return [
        f"check, options, run, more = {hot}",
        f"if {test}:",
        *[f"    {line}" for line in then],
        "for check, options, run in more:",
        f"    if {test}:",
        *[f"        {line}" for line in then],
    ]


def _branch(op: Op, hot: str, key: list[str], test: str, then: list[str], miss: str, ready: list[str]) -> list[str]:
    """Return the lines of one kind of call: look for it among the hot ones, else miss."""
    sizes = [_is_int(p, f" and {p.name} >= 0") for p in op.signature.params if p.name in op.dynamic]
    loop = _loop(hot, test, then)
    conditions = [*sizes, *ready]
    if conditions:
        loop = [f"if {' and '.join(conditions)}:", *_indent(loop)]
    return [f"key = {_tuple(key)}", *loop, f"return {miss.format(hot=hot)}"]


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _body(op: Op, flags: list[str], miss: str, ready: list[str], *, out: str) -> list[str]:
    """Return the lines that look for a hot call. ``out`` is "no", "optional" or "given".

    Calls without optional tensors come first: nearly all are. Their guard is tried before the options are compared,
    since it is false for fakes, whose symbolic options must not be. A guard refuses another number of tensors, so
    with optional ones the options, which say which are there, come first and must be plain ints.
    """
    params, options = op.signature.params, _options(op, flags)
    required = [*[p.name for p in params if p.type == "Tensor"], *(["out"] if out == "given" else [])]
    optional = [p.name for p in params if p.type == "Tensor?"]
    call = f"return run({', '.join([*op.arguments, *(['out'] if out == 'given' else [])])})"
    into = f"run({', '.join([*op.arguments, 'out'])}); return out"
    test = "check({}) and options == key"
    plain = _branch(op, "_hot", options, test.format(", ".join(required)), [call], miss, ready)
    if out == "optional":
        buffered = _branch(op, "_out", options, test.format(", ".join([*required, "out"])), [into], miss, ready)
        plain = ["if out is None:", *_indent(plain), *buffered]
    if not optional:
        return plain
    ints = [_is_int(p) for p in params if p.type.startswith("SymInt") and p.name not in op.dynamic]
    tensors = [p.name for p in params if p.is_tensor] + (["out"] if out != "no" else [])
    given = f"options == key and check(*[t for t in {_tuple(tensors)} if t is not None])"
    which = [f"{n} is None" for n in (*optional, *(["out"] if out == "optional" else []))]
    then = [f"if out is not None: {into}", call] if out == "optional" else [call]
    return [
        f"if {' and '.join(f'{n} is None' for n in optional)}:",
        *_indent(plain),
        *_branch(op, "_given", [*options, *which], given, then, miss, [*ints, *ready]),
    ]


def _recall(op: Op, extra: list[str]) -> list[str]:
    """Return the line that hands a call to the memory in C++."""
    return [f"return _recall({', '.join([*op.arguments, *extra])})"]


def front_source(op: Op, *, native: bool = False) -> str:
    """Return the text of the public function; with ``native`` what it remembers is in C++."""
    lse, out, named = op.lse, op.out, numbers(op)
    extra = [*(["return_lse=False"] if lse else []), *(["out=None"] if out else []), "override=None"]
    first = next(p.name for p in op.signature.params if p.type == "Tensor")
    optional = [p.name for p in op.signature.params if p.type == "Tensor?"]
    flags = [*(["return_lse"] if lse else []), "override"]
    form = f"{'return_lse' if lse else 'False'}, {'out' if out else 'None'}"
    miss = f"_miss({_tuple(list(op.arguments))}, {form}, override, key, '{{hot}}')"
    if native:
        body = _recall(op, [*(["out"] if out else []), *flags])
    else:
        body = _body(op, flags, miss, [f"not _overridden({first})"], out="optional" if out else "no")
    lines = [
        *[f"if {n} is None: {n} = {value!r}" for n, value in named.items()],
        "if _dynamo():",
        *[f"    {n} = _tensor({n}, {first})" for n in optional],
        "    token = override",
        "    if _inline.TOKEN is not None: token = _inline.TOKEN if token is None else f'{_inline.TOKEN}:{token}'",
        *([f"    if return_lse: return _op_lse({_keywords(op)}, override=token)"] if lse else []),
        *([f"    if out is not None: _op_out({_keywords(op)}, out=out, override=token); return out"] if out else []),
        f"    return _op({_keywords(op)}, override=token)",
        *body,
    ]
    return _function(f"{op.name}({_parameters(op, extra, named)})", lines)


def impl_source(op: Op, form: str, *, native: bool = False) -> str:
    """Return the text of the function behind one torch operator; with ``native`` what it remembers is in C++."""
    out = form == "out"
    extra = [*(["out"] if out else []), "override=None"]
    miss = f"_serve({_tuple(list(op.arguments))}, {'out' if out else 'None'}, override, key, '{{hot}}')"
    if native:
        lines = _recall(op, [*(["out"] if out else []), "override"])
    else:
        lines = _body(op, ["override"], miss, [], out="given" if out else "no")
    return _function(f"{op.name}_impl({_parameters(op, extra)})", lines)


def _function(head: str, lines: list[str]) -> str:
    return "\n".join([f"def {head}:", *[f"    {line}" for line in lines]]) + "\n"


def source_of(op: Op) -> str:
    """Return the generated text of an op's public function and operators, for reading."""
    return "\n".join([front_source(op), *[impl_source(op, f) for f in op.forms]])
