"""Who may force a kernel, and how: a call argument, ``kernel_override()``, the environment; the innermost wins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from tskernel.dispatch.registry import KernelRegistry

_PREFIX: Final = "TOKENSPEED_KERNEL_OVERRIDE_"


class _Scope:
    """One open ``kernel_override()``.

    A task that copied the context keeps the object, so closing it is seen there too.
    """

    def __init__(self, family: str, mode: str, choice: str, outer: _Scope | None) -> None:
        self.family, self.mode, self.choice, self.outer = family, mode, choice, outer
        self.open = True


_scope: ContextVar[_Scope | None] = ContextVar("tskernel_override", default=None)
_environment: tuple[int, dict[str, str]] = (-1, {})


class _OpenScopes:
    """How many scopes are open in the whole process: while there is none, a call need not look."""

    count = 0


@contextmanager
def kernel_override(family: str, mode: str, name_or_solution: str) -> Iterator[None]:
    """Force a kernel, by name or solution, for the calls of one op inside the block, in this thread or task only.

    Raises: OverrideError at once for a name that no kernel of the op has; at the call for a kernel that cannot run
    there.
    """
    from tskernel.dispatch.ranking import check_choice

    registry = KernelRegistry.get()
    check_choice(registry.operator(family, mode), name_or_solution, f'kernel_override("{family}", "{mode}", ...)')
    scope = _Scope(family, mode, name_or_solution, _scope.get())
    token = _scope.set(scope)  # before the listeners are told: inline mode reads the overrides then
    with registry.lock:
        _OpenScopes.count += 1
        registry.forget_calls()
    try:
        yield
    finally:
        scope.open = False
        _scope.reset(token)
        with registry.lock:
            _OpenScopes.count -= 1
            registry.forget_calls()


def any_scope_open() -> bool:
    """Whether some thread holds an override, so that no call may skip the look."""
    return _OpenScopes.count > 0


def active_override(family: str, mode: str) -> tuple[str, str] | None:
    """Return (choice, where it comes from) of the context or the environment for an op, or None."""
    scope = _scope.get()
    while scope is not None:
        if scope.open and scope.mode == mode and scope.family == family:
            return scope.choice, "kernel_override()"
        scope = scope.outer
    variable = f"{_PREFIX}{family}_{mode}".upper()
    choice = _read_environment().get(variable)
    return (choice, variable) if choice else None


def _read_environment() -> dict[str, str]:
    """Return the override variables, read once per registry epoch.

    A look at the environment costs as much as a whole call.
    """
    global _environment
    epoch = KernelRegistry.get().epoch
    if _environment[0] != epoch:
        _environment = epoch, {k.upper(): v.strip() for k, v in os.environ.items() if k.upper().startswith(_PREFIX)}
    return _environment[1]
