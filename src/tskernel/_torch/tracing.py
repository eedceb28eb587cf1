"""Selection for a node of a graph: inputs are fakes, sizes may be symbols, the answer holds for all values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tskernel._torch.execute import named
from tskernel.dispatch.platform import PlatformInfo
from tskernel.dispatch.ranking import Request, not_found, ranking, reject_reason
from tskernel.dispatch.registry import KernelRegistry, KernelSpec

if TYPE_CHECKING:
    from tskernel.library import Op


def choose(
    op: Op,
    form: str,
    arguments: Sequence[Any],
    out: Tensor | None,
    platform: PlatformInfo,
    choice: tuple[str, str] | None,
    *,
    for_all_sizes: bool,
) -> KernelSpec:
    """Return the kernel for a call with fake tensors.

    With ``for_all_sizes`` a kernel that restricts a trait whose value is symbolic, or whose ``rejects`` would have to
    know a symbolic size, is passed over; without, the tracer is asked, which guards on the answer. Measured times,
    which belong to sizes, are not asked.
    Raises: NoKernelFoundError or OverrideError with every candidate's reason.
    """
    traits = op.traits_of(arguments, return_lse=form == "lse")
    symbolic = {name: value for name, value in traits.items() if isinstance(value, torch.SymInt)}
    static = {name: op.trait_defaults[name] if name in symbolic else value for name, value in traits.items()}
    request = Request(op, platform, op.formats_of(arguments), static, choice=choice)
    if not for_all_sizes:
        read = _read_traits(request)
        known = {name: int(value) for name, value in symbolic.items() if name in read and value.node.has_hint()}
        request = request._replace(traits={**static, **known})
        symbolic = {name: value for name, value in symbolic.items() if name not in known}
    found, values = ranking(request), named(op, arguments, out)
    reasons = dict(found.reasons)
    for spec in found.fits:
        if limited := sorted(symbolic.keys() & spec.traits.keys()):
            reasons[spec.name] = f"{limited[0]} is dynamic in this graph"
            continue
        why = _reject_reason_for_all(spec, values) if for_all_sizes else reject_reason(spec, values)
        if why is None:
            return spec
        reasons[spec.name] = why
    raise not_found(request, reasons)


def _read_traits(request: Request) -> set[str]:
    """Return the traits that decide among the kernels of the platform, or about the chosen one."""
    names: set[str] = set()
    for spec in KernelRegistry.get().kernels_of(request.operator.name):
        chosen = request.choice is None or request.choice[0] in (spec.name, spec.solution)
        if chosen and spec.unfit(request.platform) is None:
            names.update(spec.traits, *[wanted for wanted, _ in spec.priorities])
    return names


def _reject_reason_for_all(spec: KernelSpec, values: Mapping[str, Any]) -> str | None:
    try:
        with _no_new_guards(values.values()):
            return reject_reason(spec, values)
    except _SizeAsked:
        return "its answer depends on a dynamic size"


class _SizeAsked(Exception):
    """A symbolic size would have had to be known."""


@contextmanager
def _no_new_guards(values: Any) -> Iterator[None]:
    """Raise _SizeAsked where the block needs the value of a symbolic size; leave no guard behind."""
    env = next((e for v in values if (e := _shape_env(v)) is not None), None)
    if env is None:
        yield
        return
    freeze = getattr(env, "error_on_new_guards", None)  # not in torch 2.11, which only can tell afterwards
    before = len(env.guards)
    try:
        if freeze is None:
            yield
        else:
            with freeze():
                yield
    except Exception as error:
        # torch has no public name for either of the two that ask for a size.
        if type(error).__name__ in ("_ShapeEnvGuardError", "GuardOnDataDependentSymNode"):
            raise _SizeAsked from error
        raise
    if len(env.guards) != before:
        raise _SizeAsked


def _shape_env(value: Any) -> Any:
    sizes = (value, *value.shape) if isinstance(value, Tensor) else (value,)
    return next((s.node.shape_env for s in sizes if isinstance(s, (torch.SymInt, torch.SymFloat, torch.SymBool))), None)


def statically_empty(value: Any) -> bool:
    """Whether a tensor has no element, whatever its symbolic sizes are."""
    return any(type(s) is int and s == 0 for s in value.shape)
