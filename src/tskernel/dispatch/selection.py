"""Selection: a pure function of op, platform, call and policy that returns a kernel and can explain itself."""

from __future__ import annotations

import enum
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, Protocol

import torch

from tskernel.dispatch.errors import KernelRefusedError, KernelUnavailableError, NoKernelFoundError, OverrideError
from tskernel.dispatch.explanation import Candidate, Explanation
from tskernel.dispatch.overrides import active_override, kernel_override
from tskernel.dispatch.platform import PlatformInfo, current_platform
from tskernel.dispatch.registry import KernelRegistry, KernelSpec, Operator
from tskernel.dispatch.signature import FormatSignature

__all__ = [
    "Candidate",
    "Explanation",
    "KernelRefusedError",
    "KernelUnavailableError",
    "NoKernelFoundError",
    "OverrideError",
    "Request",
    "SelectedKernel",
    "SelectionOracle",
    "SelectionPolicy",
    "explain_selection",
    "kernel_override",
    "register_oracle",
    "select_kernel",
    "set_policy",
    "warmup_selection",
]

log = logging.getLogger("tskernel.select")
_VERBOSE: Final = "TOKENSPEED_KERNEL_VERBOSE"
_NEUTRAL: Final = 10


class SelectionPolicy(enum.Enum):
    """How fitting kernels are ranked."""

    HEURISTIC = "heuristic"
    AUTOTUNE = "autotune"


class SelectionOracle(Protocol):
    """Knows better than priorities for a family: what it says ranks first."""

    def adjust(self, spec: KernelSpec, platform: PlatformInfo, traits: Mapping[str, object]) -> int:
        """Return a score in [0, 20); 10 is neutral."""
        ...


@dataclass
class _State:
    policy: SelectionPolicy = SelectionPolicy.HEURISTIC
    oracles: dict[str, SelectionOracle] = field(default_factory=dict)
    unavailable: dict[tuple[str, PlatformInfo], str] = field(default_factory=dict)
    memo: dict[Any, _Ranking] = field(default_factory=dict)


_state = _State()


@dataclass(frozen=True)
class Request:
    """What is asked for: an op on a platform, for data of some formats, with every trait stated. ``formats`` None means not given."""

    operator: Operator
    platform: PlatformInfo
    formats: FormatSignature | None
    traits: Mapping[str, object]
    features: frozenset[str] = frozenset()
    solution: str | None = None
    choice: tuple[str, str] | None = None  # (kernel name or solution, who says so)

    def key(self) -> Any:
        """Return the memo key. The type of a trait counts: True and 1 are different values."""
        traits = tuple([(k, type(v), v) for k, v in self.traits.items()])
        choice = None if self.choice is None else self.choice[0]
        return (self.operator.name, self.platform, self.formats, traits, self.features, self.solution, choice)


@dataclass(frozen=True)
class _Ranking:
    fits: tuple[KernelSpec, ...]
    reasons: Mapping[str, str]


def register_oracle(family: str, oracle: SelectionOracle | None) -> None:
    """Set the oracle of a family; None removes it."""
    with KernelRegistry.get().lock:
        if oracle is None:
            _state.oracles.pop(family, None)
        else:
            _state.oracles[family] = oracle
        KernelRegistry.get().bump()


def set_policy(policy: SelectionPolicy) -> None:
    """Set how fitting kernels are ranked. Raises: NotImplementedError for AUTOTUNE, which does not measure yet."""
    if policy is SelectionPolicy.AUTOTUNE:
        raise NotImplementedError(
            "SelectionPolicy.AUTOTUNE does not measure on first calls yet; fill the tuning database with tskernel.dispatch.autotune, "
            "which HEURISTIC reads between kernels of equal priority"
        )
    with KernelRegistry.get().lock:
        _state.policy = policy
        KernelRegistry.get().bump()


def ranking(request: Request) -> _Ranking:
    """Return the kernels that fit, best first, and why the others do not. Remembered per request."""
    registry = KernelRegistry.get()
    registry.kernels_of(request.operator.name)  # finding kernels may move the epoch: do it before reading it
    epoch = registry.epoch
    key = (epoch, request.key())
    found = _state.memo.get(key)
    if found is None:
        found = _rank(request)
        with registry.lock:
            if registry.epoch == epoch:
                if len(_state.memo) > 4096 or any(k[0] != epoch for k in _state.memo):
                    _state.memo.clear()
                _state.memo[key] = found
    return found


def _rank(request: Request) -> _Ranking:
    fits: list[KernelSpec] = []
    reasons: dict[str, str] = {}
    for spec in KernelRegistry.get().kernels_of(request.operator.name):
        why = _unfit(spec, request)
        if why is None:
            fits.append(spec)
        else:
            reasons[spec.name] = why
    fits.sort(key=lambda s: _rank_key(s, request))
    if os.environ.get(_VERBOSE):
        log.setLevel(logging.INFO)
        best = fits[0].name if fits else "none"
        log.info("%s.%s on %s: %s of %d fit, first %s", request.operator.family, request.operator.name, request.platform, len(fits), len(fits) + len(reasons), best)
    return _Ranking(tuple(fits), reasons)


def _rank_key(spec: KernelSpec, request: Request) -> tuple[float, float, str]:
    oracle = _state.oracles.get(spec.family)
    score = _NEUTRAL if oracle is None else oracle.adjust(spec, request.platform, request.traits)
    if not 0 <= score < 20:
        raise ValueError(f"oracle of {spec.family} for {spec.name}: expected a score in [0, 20), got {score}")
    return (-score, -spec.priority, spec.name)


def _unfit(spec: KernelSpec, request: Request) -> str | None:
    """Return the first hard reason against a kernel: choice, platform, features, solution, formats, traits."""
    if request.choice is not None and not _is_chosen(spec, request.choice[0]):
        return f"not the choice of {request.choice[1]}: {request.choice[0]}"
    if (why := spec.unfit(request.platform)) is not None:
        return why
    if (why := _state.unavailable.get((spec.name, request.platform))) is not None:
        return why
    if missing := request.features - spec.features:
        return f"does not offer {', '.join(sorted(missing))}"
    if request.solution is not None and spec.solution != request.solution:
        return f"solution is {spec.solution}, asked for {request.solution}"
    if spec.signatures and request.formats is not None and request.formats not in spec.signatures:
        return f"formats ({request.formats}) are not among ({' | '.join(sorted(map(str, spec.signatures)))})"
    return _trait_reason(spec, request.traits)


def _trait_reason(spec: KernelSpec, traits: Mapping[str, object]) -> str | None:
    for name, accepted in spec.traits.items():
        if not trait_accepts(accepted, traits[name]):
            text = accepted.__doc__ or accepted.__name__ if callable(accepted) else accepted
            return f"{name}={traits[name]!r} is not in {text}"
    if traits.get("return_lse") is True and not spec.lse:
        return "does not give the LSE"
    return None


def trait_accepts(accepted: Any, value: object) -> bool:
    """Whether a trait value is accepted by a container or predicate; True and 1 are different values."""
    if callable(accepted):
        return bool(accepted(value))
    if isinstance(accepted, range):
        return type(value) is int and value in accepted
    return any(type(a) is type(value) and a == value for a in accepted)


def _is_chosen(spec: KernelSpec, choice: str) -> bool:
    return choice in (spec.name, spec.solution)


def strip_fingerprint(choice: str) -> str:
    """Return the kernel name of a compiled graph's token ``"<kernel>:<fingerprint>"``; other choices pass unchanged."""
    name, colon, tail = choice.rpartition(":")
    return name if colon and len(tail) == 12 and all(c in "0123456789abcdef" for c in tail) else choice


def check_choice(operator: Operator, choice: str, source: str) -> None:
    """Raise OverrideError, with the valid names, unless some kernel of the op has that name or solution."""
    specs = KernelRegistry.get().kernels_of(operator.name)
    if any(_is_chosen(s, choice) for s in specs):
        return
    valid = sorted({s.name for s in specs} | {s.solution for s in specs})
    near = get_close_matches(choice, valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise OverrideError(f"{operator.family}.{operator.name}: {source}: no kernel or solution {choice!r}; expected one of {', '.join(valid)}{hint}")


def find_choice(operator: Operator, argument: str | None) -> tuple[str, str] | None:
    """Return the innermost override for a call: argument, then context, then environment; checked to be a valid name."""
    choice = (strip_fingerprint(argument), "override=") if argument else active_override(operator.family, operator.name)
    if choice is not None:
        check_choice(operator, *choice)
    return choice


def reject_reason(spec: KernelSpec, arguments: Mapping[str, Any]) -> str | None:
    """Return what the kernel's own ``rejects`` says of the arguments."""
    if spec.rejects is None:
        return None
    return spec.rejects(*[arguments.get(n) for n in spec.rejects_arguments])


def not_found(request: Request, reasons: Mapping[str, str]) -> Exception:
    """Return the error that says why no kernel fits: every candidate with its reason."""
    op = f"{request.operator.family}.{request.operator.name}"
    if request.choice is not None:
        told = [f"{n}: {w}" for n, w in sorted(reasons.items()) if not w.startswith("not the choice of ")]
        return OverrideError(f"{op}: {request.choice[1]} {request.choice[0]!r} cannot run here: {'; '.join(told)}")
    lines = "".join(f"\n  {n}: {w}" for n, w in sorted(reasons.items())) or "\n  (none is registered)"
    return NoKernelFoundError(f"{op} on {request.platform} ({request.formats or 'any formats'}): no kernel fits:{lines}")


def mark_unavailable(spec: KernelSpec, platform: PlatformInfo, error: BaseException) -> str:
    """Take a kernel out of automatic selection on a platform, warn once, and return the reason."""
    why = f"failed at first use: {type(error).__name__}: {error}"
    with KernelRegistry.get().lock:
        if (spec.name, platform) not in _state.unavailable:
            _state.unavailable[spec.name, platform] = why
            warnings.warn(f"tskernel: kernel {spec.name} {why}; the next one is used", RuntimeWarning, stacklevel=3)
            KernelRegistry.get().bump()
    return why


def forget_unavailable() -> None:
    """Try kernels again that failed at first use."""
    with KernelRegistry.get().lock:
        _state.unavailable.clear()
        KernelRegistry.get().bump()


@dataclass(frozen=True)
class SelectedKernel:
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
    return Request(operator, where, format_signature, stated, frozenset(features or ()), solution, find_choice(operator, override))


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

    The platform is the current one unless given, as ``PlatformInfo`` or by name. A kernel's ``rejects`` needs a call and is not asked.
    Raises: NoKernelFoundError with every candidate's reason; OverrideError for an override that cannot be met.
    """
    request = make_request(
        family, mode, format_signature, traits=traits, features=features, platform=platform, solution=solution, override=override
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
    """Return which kernel would serve, and for every other one why not; works for any platform from any host."""
    request = make_request(
        family, mode, format_signature, traits=traits, features=features, platform=platform, solution=solution, override=override
    )
    return explain_request(request)


def explain_request(request: Request, arguments: Mapping[str, Any] | None = None) -> Explanation:
    """Explain a request; with the call's arguments, what ``rejects`` says is told too."""
    found = ranking(request)
    candidates: list[Candidate] = []
    winner: str | None = None
    for spec in found.fits:
        status, reason = "fits", "lower priority" if winner else ""
        if arguments is not None:
            why = reject_reason(spec, arguments)
            status, reason = ("rejected", why) if why is not None else (status, reason)
        elif spec.rejects is not None:
            status, reason = "depends", f"rejects some calls by {', '.join(spec.rejects_arguments)}"
        # A plan names the first kernel that always serves; the ones above it serve the calls that they do not reject.
        if winner is None and status == "fits":
            winner, status = spec.name, "selected"
        candidates.append(Candidate(spec.name, spec.solution, spec.backend, spec.priority, status, reason or ""))
    registry = KernelRegistry.get()
    rejected = sorted((registry.get_by_name(n) for n in found.reasons), key=lambda s: (-s.priority, s.name))
    candidates += [Candidate(s.name, s.solution, s.backend, s.priority, "rejected", found.reasons[s.name]) for s in rejected]
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

    ``plans`` are (family, mode, format_signature, traits): their selections are made and their kernels' names returned; None means
    every op with its typical traits. ``calls`` are zero-argument functions that make real calls at capture sizes: they load, build
    and select exactly what a capture will use.
    """
    registry = KernelRegistry.get()
    todo: Sequence[Plan] = [(f, m, None, None) for f, m in registry.list_operators()] if plans is None else plans
    names = [select_kernel(f, m, s, traits=t).name for f, m, s, t in todo]
    for call in calls:
        call()
    if calls and torch.cuda.is_available():
        torch.cuda.synchronize()
    return names
