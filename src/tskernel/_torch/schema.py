"""From an annotated Python signature to a torch operator schema.

The annotation *text* is read (op files use ``from __future__ import annotations``), so nothing is evaluated at import
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

REQUIRED: Final = object()

# Annotation text -> schema type. Every int is symbolic, so that a compiled graph does not specialise on a length.
_TYPES: Final[dict[str, str]] = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
    "str": "str",
    "str | None": "str?",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
}
_RETURNS: Final[dict[str, tuple[str, int]]] = {
    "None": ("()", 0),
    "Tensor": ("Tensor", 1),
    "tuple[Tensor, Tensor]": ("(Tensor, Tensor)", 2),
    "tuple[Tensor, Tensor, Tensor]": ("(Tensor, Tensor, Tensor)", 3),
}
_LSE_RETURNS: Final = "Tensor | tuple[Tensor, Tensor]"


class Param(NamedTuple):
    """One argument of an op."""

    name: str
    type: str
    default: Any
    keyword_only: bool
    annotation: str

    @property
    def is_tensor(self) -> bool:
        """Whether the argument is a tensor or an optional tensor."""
        return self.type in ("Tensor", "Tensor?")

    @property
    def optional(self) -> bool:
        """Whether None is a legal value."""
        return self.type.endswith("?")

    def schema(self, alias: str = "") -> str:
        """Return the argument as schema text, with an alias annotation when it is written."""
        kind = self.type.replace("Tensor", f"Tensor({alias}!)", 1) if alias else self.type
        return f"{kind} {self.name}{'' if self.default is REQUIRED else '=' + _literal(self.default)}"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"') + '"'
    return repr(value)


class Signature:
    """The arguments and results of an op, without the arguments that the library adds."""

    def __init__(self, params: tuple[Param, ...], returns: str, num_returns: int) -> None:
        self.params, self.returns, self.num_returns = params, returns, num_returns

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Argument names in order."""
        return tuple(p.name for p in self.params)

    @functools.cached_property
    def positional(self) -> int:
        """How many arguments may be passed by position."""
        return sum(not p.keyword_only for p in self.params)

    @functools.cached_property
    def tensors(self) -> tuple[int, ...]:
        """Indices of the tensor arguments."""
        return tuple(i for i, p in enumerate(self.params) if p.is_tensor)

    def index(self, name: str) -> int:
        """Return the position of an argument."""
        return self.names.index(name)


def parse_signature(function: Callable[..., Any], *, lse: bool = False) -> Signature:
    """Read a function's signature; with ``lse`` its last keyword ``return_lse`` is left out.

    Raises: TypeError for an annotation that no schema type stands for.
    """
    code = function.__code__
    notes = function.__annotations__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    first_default = code.co_argcount - len(function.__defaults__ or ())
    params: list[Param] = []
    for i, name in enumerate(names):
        keyword_only = i >= code.co_argcount
        if lse and name == "return_lse":
            continue
        if keyword_only:
            default = (function.__kwdefaults__ or {}).get(name, REQUIRED)
        else:
            default = (function.__defaults__ or ())[i - first_default] if i >= first_default else REQUIRED
        note = notes.get(name)
        if note not in _TYPES:
            raise TypeError(
                f"{function.__qualname__}: argument {name}: annotation {note!r} has no schema type; "
                f"use one of {', '.join(_TYPES)}"
            )
        params.append(Param(name, _TYPES[note], default, keyword_only, note))
    note = notes.get("return")
    if lse and note == _LSE_RETURNS:
        return Signature(tuple(params), "Tensor", 1)
    if note not in _RETURNS:
        raise TypeError(f"{function.__qualname__}: return annotation {note!r}: expected one of {', '.join(_RETURNS)}")
    returns, count = _RETURNS[note]
    return Signature(tuple(params), returns, count)


def operator_schema(name: str, signature: Signature, mutates: tuple[str, ...] = (), *, form: str = "") -> str:
    """Return the schema text of one form ("", "out" or "lse") of an op."""
    letters = iter("abcdefgh")
    parts: list[str] = []
    starred = False
    for p in signature.params:
        if p.keyword_only and not starred:
            parts.append("*")
            starred = True
        parts.append(p.schema(next(letters) if p.name in mutates else ""))
    if not starred:
        parts.append("*")
    if form == "out":
        parts.append(f"Tensor({next(letters)}!) out")
    parts.append("str? override=None")
    returns = {"": signature.returns, "out": "()", "lse": "(Tensor, Tensor)"}[form]
    return f"{name}{'_' + form if form else ''}({', '.join(parts)}) -> {returns}"
