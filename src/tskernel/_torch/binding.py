"""Binds a kernel to one torch operator of a native library, so that the C++ gate can call it without Python.

The kernel stays an ordinary function, which makes the first call of a kind and all calls where the gate is not built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Constant(NamedTuple):
    """A value that a kernel always passes."""

    value: Any


class Binding(NamedTuple):
    """An operator that returns nothing, and what it is given."""

    operator: str
    arguments: tuple[str | Constant, ...]


def calls(operator: str, *arguments: str | Constant) -> Callable[[F], F]:
    """Declare that a kernel does no more than call an operator, ``"namespace::name"``, which returns nothing.

    ``arguments`` are the operator's, in order, up to those left at their defaults: names of the kernel's own arguments,
    ``out`` and ``lse`` (buffers that a kernel writes into) or ``return0``, ``return1``... (what one without ``out``
    allocates and returns, of a look that follows from its arguments' looks), and constants.
    """

    def decorate(function: F) -> F:
        vars(function)["binding"] = Binding(operator, arguments)
        return function

    return decorate


def sources(binding: Binding, slots: tuple[str, ...], *, allocated: bool) -> tuple[int | tuple[Any], ...]:
    """Return what csrc/gate/call.h reads: a slot's index, -1 - i for a result, a 1-tuple for a constant.

    With ``allocated``, ``out`` and ``lse`` are results, else ``out`` is a slot.
    """
    results = {"return0": 0, "return1": 1, "return2": 2, **({"out": 0, "lse": 1} if allocated else {})}

    def source(argument: str | Constant) -> int | tuple[Any]:
        if isinstance(argument, Constant):
            return (argument.value,)
        return -1 - results[argument] if argument in results else slots.index(argument)

    return tuple(source(a) for a in binding.arguments)
