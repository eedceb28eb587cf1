"""Adapts a kernel to the form asked for. A runner takes every argument of the op, and then ``out``, by position."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tskernel._torch.binding import Binding
from tskernel.dispatch.registry import KernelSpec, argument_names

if TYPE_CHECKING:
    from tskernel.library import Op

Runner = Callable[..., Any]
Allocator = Callable[[Sequence[Any]], Any]


class Plan(NamedTuple):
    """What a runner does, for a caller that can allocate results and set the device itself.

    ``into`` takes the results behind the arguments, where the runner allocates them; ``binding`` is the operator that
    does all of the kernel's work, if it says so and is given an ``out`` as a kernel is (``is_dense``).
    """

    run: Runner
    into: Runner | None
    binding: Binding | None
    on_device: bool


def plan_of(run: Runner) -> Plan:
    """Return the parts of a runner."""
    inner = getattr(run, "inner", run)
    return Plan(inner, getattr(inner, "into", None), getattr(inner, "binding", None), inner is not run)


def call_with(op: Op, function: Callable[..., Any], arguments: Sequence[Any], **extra: Any) -> Any:
    """Call a function that has the op's signature."""
    n = op.signature.positional
    return function(*arguments[:n], **dict(zip(op.arguments[n:], arguments[n:], strict=True)), **extra)


def is_dense(out: Tensor) -> bool:
    """Whether a kernel may write into a caller's ``out`` itself: its rows are of consecutive elements."""
    return out.dim() == 0 or out.stride(-1) == 1


def make_runner(op: Op, spec: KernelSpec, form: str) -> Runner:
    """Return the runner of a form through a kernel.

    Allocation and copies live here, so that a kernel states only how it produces its result: the last stride of an
    ``out`` that it is given is 1, whatever the caller's is. A runner serves calls whose tensors and options look like
    those of its first call, and remembers what that allocated.
    """
    extra = ("out", "lse") if form == "lse" and spec.writes_out else ("return_lse",) if form == "lse" else ()
    kernel = by_position(op, spec, extra or (("out",) if spec.writes_out else ()))
    count = len(op.arguments)
    allocate: Allocator | None = None

    def copy(*a: Any) -> None:
        a[count].copy_(kernel(*a[:count]))

    def fill(*a: Any) -> None:
        out: Tensor = a[count]
        if is_dense(out):
            kernel(*a)
            return
        staged = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        kernel(*a[:count], staged)
        out.copy_(staged)

    def write(*a: Any) -> Any:
        nonlocal allocate
        if allocate is None:
            out = op.allocate(a)
            allocate = _allocator(op, a, out)
        else:
            out = allocate(a)
        kernel(*a, out)
        return out

    def write_both(*a: Any) -> Any:
        out, lse = op.allocate(a, return_lse=True)
        kernel(*a, out, lse)
        return out, lse

    def with_lse(*a: Any) -> Any:
        return kernel(*a, True)

    vars(write)["into"] = vars(write_both)["into"] = kernel
    if form == "lse":
        made = write_both if spec.writes_out else with_lse
    elif form == "out":
        made = fill if spec.writes_out else copy
    else:
        made = write if spec.writes_out else kernel
    binding = getattr(spec.function, "binding", None)
    if binding is not None and made not in (copy, with_lse) and (form == "lse") == ("lse" in binding.arguments):
        vars(made)["binding"] = binding
    return made


def _allocator(op: Op, arguments: Sequence[Any], first: Any) -> Allocator:
    """Return what allocates an output like ``first``, that of a call with these arguments.

    The op's own hook works shapes and dtypes out in Python, which costs more than the allocation.
    """
    if type(first) is not Tensor or not first.is_contiguous():
        return op.allocate
    if not set(op.dynamic).isdisjoint(argument_names(op._raw_hooks["fake"])):  # what no look covers
        return op.allocate
    shape, strides, dtype, device = first.shape, first.stride(), first.dtype, first.device
    for i in op.signature.tensors:
        like = arguments[i]
        if like is not None and (like.shape, like.stride(), like.dtype, like.device) == (shape, strides, dtype, device):
            return lambda a: torch.empty_like(a[i])  # twice as fast as with a shape and a dtype
    return lambda a: torch.empty(shape, dtype=dtype, device=device)


@functools.cache
def by_position(op: Op, spec: KernelSpec, extra: tuple[str, ...]) -> Runner:
    """Return a kernel's function taking the op's arguments and then ``extra`` by position.

    Options are keyword-only in a kernel's signature, and passing eight of them by keyword costs as much as the whole
    selection. A plain function is therefore rebuilt with the same code and its keywords made positional.
    """
    function, names = spec.function, (*op.arguments, *extra)
    if type(function) is types.FunctionType and _rebuildable(function, names):
        code = function.__code__.replace(co_argcount=_count(function), co_kwonlyargcount=0)
        defaults = _trailing_defaults(function)
        rebuilt = types.FunctionType(code, function.__globals__, function.__name__, defaults, function.__closure__)
        rebuilt.__module__, rebuilt.__qualname__ = function.__module__, function.__qualname__
        return rebuilt
    return lambda *a: call_with(
        op, function, a[: len(op.arguments)], **dict(zip(extra, a[len(op.arguments) :], strict=True))
    )


def _count(function: types.FunctionType) -> int:
    return function.__code__.co_argcount + function.__code__.co_kwonlyargcount


def _rebuildable(function: types.FunctionType, names: tuple[str, ...]) -> bool:
    """Whether the code's arguments start with ``names``, and those behind have defaults."""
    have = argument_names(function)
    return have[: len(names)] == names and len(_trailing_defaults(function)) >= len(have) - len(names)


def _trailing_defaults(function: types.FunctionType) -> tuple[Any, ...]:
    """Return the defaults of the last arguments, up to the first one from the end that has none."""
    names, keywords = argument_names(function), function.__kwdefaults__ or {}
    positional = function.__code__.co_argcount
    given = dict(zip(names[:positional][::-1], (function.__defaults__ or ())[::-1], strict=False))
    found: list[Any] = []
    for name in reversed(names):
        values = given if name in given else keywords
        if name not in values:
            break
        found.insert(0, values[name])
    return tuple(found)


def on_device(run: Runner, device: torch.device) -> Runner:
    """Make a runner launch on its tensors' device; with one GPU there is nothing to do."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return run

    def guarded(*a: Any) -> Any:
        with torch.cuda.device(device):
            return run(*a)

    vars(guarded)["inner"] = run
    return guarded
