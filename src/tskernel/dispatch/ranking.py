"""Which kernels fit a request, in which order, and why the others do not."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tskernel.dispatch.errors import NoKernelFoundError, OverrideError
from tskernel.dispatch.overrides import active_override
from tskernel.dispatch.platform import PlatformInfo
from tskernel.dispatch.policy import oracle_score, unavailable_reason
from tskernel.dispatch.registry import KernelRegistry, KernelSpec, Operator
from tskernel.dispatch.signature import FormatSignature
from tskernel.dispatch.spec import trait_accepts

log = logging.getLogger("tskernel.select")
_VERBOSE: Final = "TOKENSPEED_KERNEL_VERBOSE"


class Request(NamedTuple):
    """What is asked for: an op on a platform, for data of some formats, with every trait stated.

    ``formats`` None means not given.
    """

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


class Ranking(NamedTuple):
    """The kernels that fit, best first, and why each other one does not."""

    fits: tuple[KernelSpec, ...]
    reasons: Mapping[str, str]


_memo: dict[Any, Ranking] = {}


def ranking(request: Request) -> Ranking:
    """Return the kernels that fit, best first, and why the others do not. Remembered per request."""
    registry = KernelRegistry.get()
    registry.kernels_of(request.operator.name)  # finding kernels may move the epoch: do it before reading it
    epoch = registry.epoch
    key = (epoch, request.key())
    found = _memo.get(key)
    if found is None:
        found = _rank(request)
        with registry.lock:
            if registry.epoch == epoch:
                if len(_memo) > 4096 or any(k[0] != epoch for k in _memo):
                    _memo.clear()
                _memo[key] = found
    return found


def _rank(request: Request) -> Ranking:
    fits: list[KernelSpec] = []
    reasons: dict[str, str] = {}
    for spec in KernelRegistry.get().kernels_of(request.operator.name):
        why = unfit(spec, request)
        if why is None:
            fits.append(spec)
        else:
            reasons[spec.name] = why
    fits.sort(key=lambda s: _rank_key(s, request))
    if os.environ.get(_VERBOSE):
        log.setLevel(logging.INFO)
        best = fits[0].name if fits else "none"
        log.info(
            "%s.%s on %s: %s of %d fit, first %s",
            request.operator.family,
            request.operator.name,
            request.platform,
            len(fits),
            len(fits) + len(reasons),
            best,
        )
    return Ranking(tuple(fits), reasons)


def _rank_key(spec: KernelSpec, request: Request) -> tuple[float, float, str]:
    return (-oracle_score(spec, request.platform, request.traits), -spec.priority_of(request.traits), spec.name)


def unfit(spec: KernelSpec, request: Request) -> str | None:
    """Return the first hard reason against a kernel: choice, platform, features, solution, formats, traits."""
    if request.choice is not None and not _is_chosen(spec, request.choice[0]):
        return f"not the choice of {request.choice[1]}: {request.choice[0]}"
    if (why := spec.unfit(request.platform)) is not None:
        return why
    if (why := unavailable_reason(spec, request.platform)) is not None:
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
    from difflib import get_close_matches  # here: only an error needs it

    near = get_close_matches(choice, valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise OverrideError(
        f"{operator.family}.{operator.name}: {source}: no kernel or solution {choice!r}; "
        f"expected one of {', '.join(valid)}{hint}"
    )


def find_choice(operator: Operator, argument: str | None) -> tuple[str, str] | None:
    """Return the innermost override for a call: argument, then context, then environment.

    Checked to be a valid name.
    """
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
    return NoKernelFoundError(
        f"{op} on {request.platform} ({request.formats or 'any formats'}): no kernel fits:{lines}"
    )
