"""Runs a call: checks, selects, and adapts the kernel to the form asked for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tskernel._torch.runners import Runner, make_runner, on_device
from tskernel._torch.validate import refuse_gradient
from tskernel.dispatch import autotune
from tskernel.dispatch.errors import KernelRefusedError, KernelUnavailableError
from tskernel.dispatch.platform import platform_of
from tskernel.dispatch.policy import mark_unavailable
from tskernel.dispatch.ranking import Request, find_choice, not_found, ranking, reject_reason
from tskernel.dispatch.selection import explain_request

if TYPE_CHECKING:
    from tskernel.dispatch.explanation import Explanation
    from tskernel.library import Op

INLINE = "inline:"  # an override that stands for "whatever is selected": the token of a graph traced in inline mode


def token_choice(token: str) -> str | None:
    """Return the override that an inline token ``"inline:<fingerprint>[:<override>]"`` carries."""
    return token[len(INLINE) :].partition(":")[2] or None


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
    extra = (out,) if form == "out" else ()
    if autotune.wants_measuring(request, found.fits, arguments, form):
        autotune.tune(op, *arguments, form=form)
    for spec in autotune.order(found.fits, request, arguments, form):
        why = reject_reason(spec, values)
        if why is None:
            run = on_device(make_runner(op, spec, form), call_device(op, arguments))
            try:
                return run(*arguments, *extra), run
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
            extra = (out,) if form == "out" else ()
            with contextlib.suppress(KernelRefusedError, KernelUnavailableError, ImportError, OSError):
                times[spec.name] = autotune.measure(functools.partial(_run, run, extra), copies)
    return times


def _run(run: Runner, extra: tuple[Any, ...], arguments: Sequence[Any]) -> Any:
    return run(*arguments, *extra)


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


def explain_call(
    op: Op, *args: Any, return_lse: bool = False, out: Tensor | None = None, override: str | None = None, **kwargs: Any
) -> Explanation:
    """Return which kernel would serve a call, and why."""
    from tskernel.library import validate

    arguments = op.fill({**dict(zip(op.arguments, args, strict=False)), **kwargs})
    form = "lse" if return_lse else "out" if out is not None else ""
    validate(op, arguments, form, out)
    return explain_request(call_request(op, arguments, form, override), named(op, arguments, out))
