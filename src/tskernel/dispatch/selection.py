"""Selection: a pure function of op, platform, call and policy that returns a kernel and can explain itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tskernel.dispatch.errors import KernelRefusedError, KernelUnavailableError, NoKernelFoundError, OverrideError
from tskernel.dispatch.overrides import kernel_override
from tskernel.dispatch.platform import PlatformInfo, current_platform
from tskernel.dispatch.policy import SelectionOracle, SelectionPolicy, forget_unavailable, register_oracle, set_policy
from tskernel.dispatch.ranking import Request, find_choice, not_found, ranking, reject_reason
from tskernel.dispatch.registry import KernelRegistry, KernelSpec
from tskernel.dispatch.signature import FormatSignature

if TYPE_CHECKING:
    from tskernel.dispatch.explanation import Candidate, Explanation

__all__ = [
    "KernelRefusedError",
    "KernelUnavailableError",
    "NoKernelFoundError",
    "OverrideError",
    "SelectedKernel",
    "SelectionOracle",
    "SelectionPolicy",
    "explain_request",
    "explain_selection",
    "forget_unavailable",
    "kernel_override",
    "make_request",
    "register_oracle",
    "select_kernel",
    "set_policy",
    "warmup_selection",
]


class SelectedKernel(NamedTuple):
    """A kernel bound for a platform. Calling it calls the kernel's function: no checks, the kernel's own arguments."""

    spec: KernelSpec
    platform: PlatformInfo

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.spec.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel."""
        return self.spec.function(*args, **kwargs)


def make_request(
    family: str,
    mode: str,
    format_signature: FormatSignature | None = None,
    *,
    traits: Mapping[str, object] | None = None,
    features: Iterable[str] | None = None,
    platform: PlatformInfo | str | None = None,
    solution: str | None = None,
    override: str | None = None,
) -> Request:
    """Build a request without a call. Traits that are not given take the op's typical value.

    Raises: ValueError for a trait that the op does not declare.
    """
    operator = KernelRegistry.get().operator(family, mode)
    stated = dict(operator.trait_defaults)
    for name, value in (traits or {}).items():
        if name not in stated:
            raise ValueError(f"{family}.{mode}: trait {name!r}: expected one of {', '.join(sorted(stated)) or 'none'}")
        stated[name] = value
    where = PlatformInfo.named(platform) if isinstance(platform, str) else platform or current_platform()
    return Request(
        operator, where, format_signature, stated, frozenset(features or ()), solution, find_choice(operator, override)
    )


def select_kernel(
    family: str,
    mode: str,
    format_signature: FormatSignature | None = None,
    *,
    traits: Mapping[str, object] | None = None,
    features: Iterable[str] | None = None,
    platform: PlatformInfo | str | None = None,
    solution: str | None = None,
    override: str | None = None,
) -> SelectedKernel:
    """Return the kernel that serves ``family.mode`` for data of these formats and traits on a platform.

    The platform is the current one unless given, as ``PlatformInfo`` or by name. A kernel's ``rejects`` needs a call
    and is not asked.
    Raises: NoKernelFoundError with every candidate's reason; OverrideError for an override that cannot be met.
    """
    request = make_request(
        family,
        mode,
        format_signature,
        traits=traits,
        features=features,
        platform=platform,
        solution=solution,
        override=override,
    )
    found = ranking(request)
    if not found.fits:
        raise not_found(request, found.reasons)
    return SelectedKernel(found.fits[0], request.platform)


def explain_selection(
    family: str,
    mode: str,
    format_signature: FormatSignature | None = None,
    *,
    traits: Mapping[str, object] | None = None,
    features: Iterable[str] | None = None,
    platform: PlatformInfo | str | None = None,
    solution: str | None = None,
    override: str | None = None,
) -> Explanation:
    """Return which kernel would serve, and for every other one why not; works for any platform from any host.

    Without a call's arguments the winner is the first in rank; where it may still reject a call, its line says by which
    arguments.
    """
    request = make_request(
        family,
        mode,
        format_signature,
        traits=traits,
        features=features,
        platform=platform,
        solution=solution,
        override=override,
    )
    return explain_request(request)


def explain_request(request: Request, arguments: Mapping[str, Any] | None = None) -> Explanation:
    """Explain a request; with the call's arguments, what ``rejects`` says is told too."""
    from tskernel.dispatch.explanation import Candidate, Explanation

    found = ranking(request)
    candidates: list[Candidate] = []
    winner: str | None = None
    for spec in found.fits:
        why = None if arguments is None else reject_reason(spec, arguments)
        looks = (
            ""
            if arguments is not None or spec.rejects is None
            else f"unless it rejects the call by {', '.join(spec.rejects_arguments)}"
        )
        if why is not None:
            status, reason = "rejected", why
        elif winner is None:
            winner, status, reason = spec.name, "selected", looks
        else:
            status, reason = "fits", f"ranks lower{', ' + looks if looks else ''}"
        priority = spec.priority_of(request.traits)
        candidates.append(Candidate(spec.name, spec.solution, spec.backend, priority, status, reason))
    registry = KernelRegistry.get()
    rejected = sorted((registry.get_by_name(n) for n in found.reasons), key=lambda s: (-s.priority, s.name))
    candidates += [
        Candidate(s.name, s.solution, s.backend, s.priority, "rejected", found.reasons[s.name]) for s in rejected
    ]
    return Explanation(
        op=f"{request.operator.family}.{request.operator.name}",
        platform=str(request.platform),
        formats=str(request.formats or "any"),
        traits=dict(request.traits),
        override=request.choice,
        winner=winner,
        candidates=tuple(candidates),
    )


Plan = tuple[str, str, FormatSignature | None, Mapping[str, object] | None]


def warmup_selection(plans: Sequence[Plan] | None = None, *, calls: Sequence[Callable[[], Any]] = ()) -> list[str]:
    """Do ahead of time what a first call would do, so that nothing is selected or compiled during graph capture.

    ``plans`` are (family, mode, format_signature, traits): their selections are made and their kernels' names returned;
    None means every op with its typical traits. ``calls`` are zero-argument functions that make real calls at capture
    sizes: they load, build and select exactly what a capture will use.
    """
    registry = KernelRegistry.get()
    todo: Sequence[Plan] = [(f, m, None, None) for f, m in registry.list_operators()] if plans is None else plans
    names = [select_kernel(f, m, s, traits=t).name for f, m, s, t in todo]
    for call in calls:
        call()
    if calls and torch.cuda.is_available():
        torch.cuda.synchronize()
    return names
