"""Launches of a Triton program that is called again and again with tensors that look the same.

``kernel[grid](*arguments, **options)`` binds and classifies every argument in Python each time: 40 us for 60 of them.
``prepare(kernel, grid, *arguments, **options)`` takes the same and returns a launch that wants only the tensors::

    launch = prepare(_kernel, (8, 1, 64), x, out, n, stride, BLOCK=64, num_warps=4)
    launch(x, out)  # compiles in the ordinary way, remembers the compiled kernel
    launch(y, out)  # hands the pointers to that kernel's own launcher: 3 us

Numbers and constants are those given to ``prepare``; the tensors of a call must have the dtypes and the device of then.
What else Triton compiles for is looked at in every call: the device, whether each pointer is a multiple of 16, on AMD
whether its storage is under 2 GiB. Where that is new, where a profiler has hooks, under the interpreter, or where
Triton's internals are not the ones known here, the call goes the ordinary way.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.lazy_triton import resolved

_BUFFER: Final = 2**31 - 1  # AMD's buffer instructions reach so far
_STREAM: Final = object()
_POINTER, _OBJECT, _CONSTANT = "p", "t", "c"

Launch = Callable[..., None]


def prepare(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> Prepared:
    """Return a launch of ``kernel[grid](*arguments, **options)`` that takes the tensors among ``arguments``, in order.

    Tensor descriptors count as tensors. Nothing is compiled or launched, and no tensor is kept.
    Raises: ValueError where a tensor is given by keyword.
    """
    for name, value in options.items():
        if _is_open(value):
            raise ValueError(f"prepare: {name}: expected a number or a constant, got a tensor; give it by position")
    return Prepared(kernel, (*grid, 1, 1)[:3], arguments, options)


class Prepared:
    """A launch with everything but tensors fixed; threads may share it."""

    __slots__ = ("_arguments", "_grid", "_hot", "_kernel", "_open", "_options", "_seen")

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Keep what is fixed; see ``prepare``."""
        self._kernel, self._grid, self._options = kernel, grid, options
        self._open = tuple(i for i, value in enumerate(arguments) if _is_open(value))
        self._arguments = tuple(None if _is_open(value) else value for value in arguments)
        self._seen: dict[Any, Launch] = {}
        self._hot: Launch = self._find

    def __call__(self, *given: Any) -> None:
        """Launch with these tensors: as many as ``prepare`` was given, in that order.

        Raises: TypeError for another number of tensors.
        """
        self._hot(*given)

    def _find(self, *given: Any) -> None:
        """Launch what was compiled for such tensors, else go the ordinary way and remember it."""
        if len(given) != len(self._open):
            raise TypeError(f"prepared launch: expected {len(self._open)} tensors, got {len(given)}")
        hooks = _hooks()
        if any(getattr(hook, "calls", True) for hook in hooks) or not hasattr(resolved(self._kernel), "device_caches"):
            self._ordinary(given)  # somebody wants to hear of launches, or this is the interpreter
            return
        key = (hooks, _key(given))
        launch = self._seen.get(key)
        if launch is None:
            self._remember(key, self._ordinary(given), given)
        else:
            launch(*given)

    def _ordinary(self, given: tuple[Any, ...]) -> Any:
        arguments = list(self._arguments)
        for i, value in zip(self._open, given, strict=True):
            arguments[i] = value
        return self._kernel[self._grid](*arguments, **self._options)

    def _remember(self, key: Any, compiled: Any, given: tuple[Any, ...]) -> None:
        function = resolved(self._kernel)
        kinds, constants = self._values(list(inspect.signature(function.fn).parameters.values()), given)
        route = _route(function, compiled, self._grid, len(kinds))
        if route is None:
            return
        if compiled.metadata.target.backend == "cuda" and all(map(_aligned, given)):
            make = _compile(kinds, route.head.index(_STREAM), len(route.head), route.nested)
            self._seen[key] = self._hot = make(route, constants, key[0], self._find)
        else:
            self._seen[key] = _assembled(route, kinds, constants)

    def _values(self, parameters: Sequence[inspect.Parameter], given: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
        """Return the kind of every parameter of the program, and the values of those that are constant."""
        kinds, constants = "", []
        order = dict(zip(self._open, given, strict=True))
        for i, p in enumerate(parameters):
            if i in order:
                kinds += _POINTER if isinstance(order[i], Tensor) else _OBJECT
            else:
                kinds += _CONSTANT
                constants.append(
                    self._arguments[i] if i < len(self._arguments) else self._options.get(p.name, p.default)
                )
        return kinds, tuple(constants)


class _Route(NamedTuple):
    """A function that launches one compiled kernel: ``target(*head, *values)``, or ``target(*head, values)`` if nested.

    ``head`` holds ``_STREAM`` in the place of the stream. ``before`` are Triton's hooks of the function.
    """

    target: Callable[..., Any]
    head: tuple[Any, ...]
    nested: bool
    stream: Callable[[int], int]
    current: Callable[[], int]
    device: int
    before: list[Any]


def _route(function: Any, compiled: Any, grid: tuple[int, ...], count: int) -> _Route | None:
    """Return how to launch a compiled kernel, or None where Triton's internals are not as in 3.6 and 3.7."""
    from triton.runtime import driver

    if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata", "metadata")):
        return None  # a compilation that is not done
    if compiled.metadata.target.backend not in ("cuda", "hip"):
        return None
    names = tuple(inspect.signature(type(compiled.run).__call__).parameters)
    known = names[1:6] == ("gridX", "gridY", "gridZ", "stream", "function")
    if not known or not compiled.function or getattr(function, "pre_run_hooks", True):
        return None
    head = (*grid, _STREAM, compiled.function, compiled.packed_metadata, None, None, None)
    target, head, nested = _inside(compiled.run, head, count) or (compiled.run, head, False)
    active: Any = driver.active
    current = active.get_current_device
    return _Route(target, head, nested, active.get_current_stream, current, current(), function.pre_run_hooks)


def _inside(
    launcher: Any, head: tuple[Any, ...], count: int
) -> tuple[Callable[..., Any], tuple[Any, ...], bool] | None:
    """Return what Triton's launcher object calls in turn, and with what: its C function, found by asking a copy of it.

    The object itself allocates scratch memory, for kernels that need some; the others do without half the time of a
    launch.
    """
    sizes = [value for name, value in vars(launcher).items() if name.endswith("scratch_size")]
    if not sizes or any(sizes) or not callable(getattr(launcher, "launch", None)):
        return None
    calls: list[tuple[Any, ...]] = []
    probe, values = copy.copy(launcher), tuple(object() for _ in range(count))
    probe.launch = lambda *a: calls.append(a)
    probe(*head, *values)
    if len(calls) != 1 or calls[0].count(_STREAM) != 1:
        return None
    if calls[0][-1:] == (values,):
        return launcher.launch, calls[0][:-1], True
    return (launcher.launch, calls[0][:-count], False) if calls[0][-count:] == values else None


def _assembled(route: _Route, kinds: str, constants: Sequence[Any]) -> Launch:
    """Return a launch that passes tensors on as they are: Triton's launcher reads their pointers."""
    rest = iter(constants)
    template = [next(rest) if kind == _CONSTANT else None for kind in kinds]
    places = [i for i, kind in enumerate(kinds) if kind != _CONSTANT]
    at = route.head.index(_STREAM)
    first, last = route.head[:at], route.head[at + 1 :]

    def launch(*given: Any) -> None:
        values = template.copy()
        for i, value in zip(places, given, strict=True):
            values[i] = value
        end = (tuple(values),) if route.nested else values
        route.target(*first, route.stream(route.device), *last, *end)

    return launch


@functools.lru_cache(maxsize=256)
def _compile(kinds: str, stream: int, head: int, nested: bool) -> Callable[..., Launch]:
    """Return what makes the launch of aligned tensors on one device.

    Generated, so that it names its arguments: going through them in a loop costs as much as the launch.
    """
    names = [f"{kind}{i}" for i, kind in enumerate(kinds)]
    pointers = [i for i, kind in enumerate(kinds) if kind == _POINTER]
    given = ", ".join(f"t{i}" for i, kind in enumerate(kinds) if kind != _CONSTANT)
    fixed = [f"h{i}" for i in range(head)]
    first = ", ".join("stream(device)" if i == stream else name for i, name in enumerate(fixed))
    values = ", ".join(names) + ","
    lines = [
        "def make(route, constants, hooks, find):",
        "    target, stream, current, device = route.target, route.stream, route.current, route.device",
        "    before, (enter, leave) = route.before, hooks",
        f"    [{', '.join(fixed)}] = route.head",
        f"    [{', '.join(name for name in names if name[0] == _CONSTANT)}] = constants",
        f"    def launch({given}):",
        *[f"        p{i} = t{i}.data_ptr()" for i in pointers],
        f"        if (({' | '.join(f'p{i}' for i in pointers) or '0'}) & 15 or current() != device or before",
        "            or runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave",
        "            or enter.calls or leave.calls):",
        f"            find({given})",
        "        else:",
        f"            target({first}, {f'({values})' if nested else values})",
        "    return launch",
    ]
    scope: dict[str, Any] = {"runtime": _runtime()}
    exec("\n".join(lines), scope)
    return scope["make"]


def _hooks() -> tuple[Any, Any]:
    """Return Triton's two chains of functions that are told of launches."""
    return _runtime().launch_enter_hook, _runtime().launch_exit_hook


def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def _is_open(value: Any) -> bool:
    return isinstance(value, Tensor) or (hasattr(value, "base") and hasattr(value, "block_shape"))


def _aligned(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.data_ptr() % 16 == 0


def _key(given: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a program is compiled for besides what is fixed."""
    from triton.runtime import driver

    active: Any = driver.active
    key = (active.get_current_device(), *map(_aligned, given))
    if torch.version.hip is None:
        return key
    return (*key, *[isinstance(t, Tensor) and t.untyped_storage().size() <= _BUFFER for t in given])
