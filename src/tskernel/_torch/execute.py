"""Runs a call.

Checks, selects, adapts the kernel to the form asked for, and remembers the answer for calls that look the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tskernel._torch.guard import make_guard
from tskernel._torch.validate import refuse_gradient
from tskernel.dispatch import autotune
from tskernel.dispatch.errors import KernelRefusedError, KernelUnavailableError
from tskernel.dispatch.explanation import Explanation
from tskernel.dispatch.overrides import any_scope_open
from tskernel.dispatch.platform import platform_of
from tskernel.dispatch.policy import mark_unavailable
from tskernel.dispatch.ranking import Request, find_choice, not_found, ranking, reject_reason
from tskernel.dispatch.registry import KernelRegistry, KernelSpec
from tskernel.dispatch.selection import explain_request

if TYPE_CHECKING:
    from tskernel.library import Op

Runner = Callable[..., Any]
INLINE = "inline:"  # an override that stands for "whatever is selected": the token of a graph traced in inline mode


def token_choice(token: str) -> str | None:
    """Return the override that an inline token ``"inline:<fingerprint>[:<override>]"`` carries."""
    return token[len(INLINE) :].partition(":")[2] or None


def call_with(op: Op, function: Callable[..., Any], arguments: Sequence[Any], **extra: Any) -> Any:
    """Call a function that has the op's signature."""
    n = op.signature.positional
    return function(*arguments[:n], **dict(zip(op.arguments[n:], arguments[n:], strict=True)), **extra)


def make_runner(op: Op, spec: KernelSpec, form: str) -> Runner:
    """Return a function with the op's signature (and ``out`` for the out form) that gives the form's result.

    Allocation and copies live here, so that a kernel states only how it produces its result.
    """
    kernel, n, names = spec.function, op.signature.positional, op.arguments

    def positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [*args, *[kwargs[k] for k in names[n:]]]

    if form == "out":
        if spec.writes_out:
            return kernel
        return lambda *a, out, **k: _copy(out, kernel(*a, **k))
    if form == "lse":
        if not spec.writes_out:
            return lambda *a, **k: kernel(*a, **k, return_lse=True)

        def write_both(*a: Any, **k: Any) -> Any:
            out, lse = op.allocate(positional(a, k), return_lse=True)
            kernel(*a, **k, out=out, lse=lse)
            return out, lse

        return write_both
    if not spec.writes_out:
        return kernel

    def write(*a: Any, **k: Any) -> Any:
        out = op.allocate(positional(a, k))
        kernel(*a, **k, out=out)
        return out

    return write


def _copy(out: Tensor, value: Tensor) -> None:
    out.copy_(value)


def on_device(run: Runner, device: torch.device) -> Runner:
    """Make a runner launch on its tensors' device; with one GPU there is nothing to do."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return run

    def guarded(*a: Any, **k: Any) -> Any:
        with torch.cuda.device(device):
            return run(*a, **k)

    return guarded


def call_device(op: Op, arguments: Sequence[Any]) -> torch.device:
    """Return the device of a call's tensors."""
    return next(arguments[i].device for i in op.signature.tensors if arguments[i] is not None)


def call_request(op: Op, arguments: Sequence[Any], form: str, override: str | None) -> Request:
    """Return what a call asks for."""
    if override is not None and override.startswith(INLINE):
        override = token_choice(override)
    return Request(
        op,
        platform_of(call_device(op, arguments)),
        op.formats_of(arguments),
        op.traits_of(arguments, return_lse=form == "lse"),
        choice=find_choice(op, override),
    )


def named(op: Op, arguments: Sequence[Any], out: Tensor | None) -> dict[str, Any]:
    """Return the arguments by name, as ``rejects`` reads them."""
    return {**dict(zip(op.arguments, arguments, strict=True)), "out": out}


def execute(
    op: Op, form: str, arguments: Sequence[Any], out: Tensor | None, override: str | None
) -> tuple[Any, Runner | None]:
    """Check, select and run; return the result and what ran (None when there was nothing to do).

    Raises: ValueError for bad input, before anything runs; NoKernelFoundError or OverrideError when nothing fits.
    """
    from tskernel.library import validate

    refuse_gradient(op, arguments)
    validate(op, arguments, form, out)
    request = call_request(op, arguments, form, override)
    found = ranking(request)
    nothing, result = _nothing_to_do(op, form, arguments, out)
    if nothing and found.fits:
        return result, None
    values, reasons = named(op, arguments, out), dict(found.reasons)
    extra = {"out": out} if form == "out" else {}
    if autotune.wants_measuring(request, found.fits, arguments, form):
        autotune.tune(op, *arguments, form=form)
    for spec in autotune.order(found.fits, request, arguments, form):
        why = reject_reason(spec, values)
        if why is None:
            run = on_device(make_runner(op, spec, form), call_device(op, arguments))
            try:
                return call_with(op, run, arguments, **extra), run
            except KernelRefusedError as error:
                if request.choice is not None:
                    raise
                why = str(error)
            except (KernelUnavailableError, ImportError, OSError) as error:
                if request.choice is not None:
                    raise
                why = mark_unavailable(spec, request.platform, error)
        reasons[spec.name] = why
    raise not_found(request, reasons)


def time_kernels(op: Op, request: Request, arguments: Sequence[Any], form: str) -> dict[str, float]:
    """Return microseconds of every kernel that takes the call, on copies of what it writes.

    One that fails is left out.
    """
    out = op.allocate(arguments) if form == "out" else None
    values = named(op, arguments, out)
    written = {op.signature.index(n) for n in op.mutates}
    copies = [a.clone() if i in written else a for i, a in enumerate(arguments)]
    times: dict[str, float] = {}
    for spec in ranking(request).fits:
        if reject_reason(spec, values) is None:
            run = on_device(make_runner(op, spec, form), call_device(op, arguments))
            extra = {"out": out} if form == "out" else {}
            with contextlib.suppress(KernelRefusedError, KernelUnavailableError, ImportError, OSError):
                times[spec.name] = autotune.measure(functools.partial(call_with, op, run, **extra), copies)
    return times


def _nothing_to_do(op: Op, form: str, arguments: Sequence[Any], out: Tensor | None) -> tuple[bool, Any]:
    """Return whether all results are empty, and the results then: no kernel need cope with a grid of zero blocks."""
    if all(arguments[i] is None or arguments[i].numel() for i in op.signature.tensors):
        return False, None
    if form == "out":
        return out is not None and out.numel() == 0, None
    if op.mutates:
        return all(arguments[op.signature.index(n)].numel() == 0 for n in op.mutates), None
    result = op.allocate(arguments, return_lse=form == "lse")
    parts = result if isinstance(result, tuple) else (result,)
    return all(p.numel() == 0 for p in parts), result


class Route:
    """One entry point of an op (public function or one torch operator), with its memory.

    ``namespace`` is the generated function's globals; ``_hot`` in it is (scalars, guard, runner) of the last call, so
    that a call that looks the same costs one comparison. Older looks are kept in ``_seen``.
    """

    _LIMIT = 1024

    def __init__(self, op: Op) -> None:
        self.op = op
        self.namespace: dict[str, Any] = {}
        self._seen: dict[Any, tuple[Any, Any, Any]] = {}
        self.forget()
        KernelRegistry.get().on_change(self.forget)

    def forget(self) -> None:
        """Drop everything that was remembered."""
        self.namespace["_hot"] = (object(), None, None)
        self._seen.clear()

    def recall(self, scalars: Any, tensors: Sequence[Tensor]) -> Runner | None:
        """Return the runner of an earlier call that looked the same, and make it the hot one."""
        first = tensors[0]
        entry = self._seen.get((scalars, first.shape)) if isinstance(first, Tensor) else None
        if entry is None or not entry[1](*tensors):
            return None
        self.namespace["_hot"] = entry
        return entry[2]

    def remember(self, scalars: Any, tensors: Sequence[Tensor], run: Runner, generation: int) -> None:
        """Remember what served a call, unless a registration or an override came between or one is open."""
        guard = make_guard(tensors)
        registry = KernelRegistry.get()
        with registry.lock:
            if guard is None or any_scope_open() or registry.generation != generation:
                return
            if len(self._seen) >= self._LIMIT:
                self._seen.clear()
            entry = (scalars, guard, run)
            self._seen[scalars, tensors[0].shape] = entry
            self.namespace["_hot"] = entry

    def serve(self, form: str, arguments: Sequence[Any], out: Tensor | None, override: str | None, scalars: Any) -> Any:
        """Serve a call that is not the hot one."""
        tensors = [t for t in (*[arguments[i] for i in self.op.signature.tensors], out) if t is not None]
        generation = KernelRegistry.get().generation
        if (run := self.recall(scalars, tensors)) is not None and _dynamic_ok(self.op, arguments):
            return call_with(self.op, run, arguments, **({"out": out} if form == "out" else {}))
        result, run = execute(self.op, form, arguments, out, override)
        if run is not None:
            self.remember(scalars, tensors, run, generation)
        return result


def _dynamic_ok(op: Op, arguments: Sequence[Any]) -> bool:
    values = (arguments[op.signature.index(n)] for n in op.dynamic)
    return all(v is None or (type(v) is int and v >= 0) for v in values)


def explain_call(
    op: Op, *args: Any, return_lse: bool = False, out: Tensor | None = None, override: str | None = None, **kwargs: Any
) -> Explanation:
    """Return which kernel would serve a call, and why."""
    from tskernel.library import validate

    arguments = op.fill({**dict(zip(op.arguments, args, strict=False)), **kwargs})
    form = "lse" if return_lse else "out" if out is not None else ""
    validate(op, arguments, form, out)
    return explain_request(call_request(op, arguments, form, override), named(op, arguments, out))
